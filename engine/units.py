"""Amounts of memory as people write them."""

import re
from fractions import Fraction

_POWER = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_MOST = 1 << 60


def parse_bytes(text: str) -> int:
    """`8GB`, `8 GB`, `512MiB`, `1.5g`, `4096`: K, M, G and T count in thousands, Ki, Mi, Gi and Ti in 1024s, a bare
    number in bytes. Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", text.strip().lower())
    if match is None or (match[3] and not match[2]):
        raise ValueError(f"{text!r} is no amount of memory; write 8GB, 512MiB or a number of bytes")
    amount = int(Fraction(match[1]) * (1024 if match[3] else 1000) ** _POWER[match[2]])
    if amount > _MOST:
        raise ValueError(f"{text[:20]!r} is more memory than any machine has")
    return amount
