import pytest

from loraplex.engine.units import parse_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4096", 4096), ("8GB", 8 * 10**9), ("8 gb", 8 * 10**9), ("512MiB", 512 << 20), ("512Mi", 512 << 20),
        ("1.5g", 1_500_000_000), ("2TiB", 2 << 40), ("7kB", 7000), ("10B", 10), ("0", 0),
    ],
)  # fmt: skip
def test_amounts(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "GB", "-1", "8 XB", "8iB", "1e9", "auto", "8GBB", "1.GB"])
def test_what_is_no_amount(text: str) -> None:
    with pytest.raises(ValueError, match="8GB, 512MiB"):
        parse_bytes(text)


def test_amounts_are_exact_and_bounded() -> None:
    assert parse_bytes("9007199254740993") == 2**53 + 1
    for text in ("9" * 400, "2000000TB"):
        with pytest.raises(ValueError, match="more memory"):
            parse_bytes(text)
