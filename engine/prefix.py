"""Names of KV pages: a SHA-256 chain over (namespace, tokens), so a page's name says all that its content depends on.

The namespace is a structured pair (adapter digest, cache salt), never a joined string: names that collide by
concatenation let one tenant read another's KV (SGLang #24638). Python's hash() is predictable and is not used
(CVE-2025-25183).
"""

import hashlib
from array import array

import msgspec


def namespace_root(adapter_digest: str | None, salt: str) -> bytes:
    """Root of the chain for one adapter content and one salt."""
    return hashlib.sha256(msgspec.msgpack.encode((adapter_digest, salt))).digest()


def extend_chain(chain: list[bytes], root: bytes, tokens: list[int], page_size: int) -> None:
    """Appends to `chain` the names of those full pages of `tokens` that it does not name yet."""
    for page in range(len(chain), len(tokens) // page_size):
        parent = chain[-1] if chain else root
        content = array("q", tokens[page * page_size : (page + 1) * page_size]).tobytes()
        chain.append(hashlib.sha256(parent + content).digest())
