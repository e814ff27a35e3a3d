import pytest

from loraplex.engine.parallel import Parallel


def test_slices_cover_everything_once():
    for size in (1, 2, 4):
        owned = [i for rank in range(size) for i in range(24)[Parallel(rank, size).local_slice(24)]]
        assert owned == list(range(24))


def test_fewer_units_than_ranks_are_replicated():
    """Two key/value heads of 8 on four ranks: ranks 0 and 1 hold the first."""
    assert [Parallel(r, 4).local_slice(16, 2) for r in range(4)] == [slice(0, 8)] * 2 + [slice(8, 16)] * 2
    assert Parallel(0, 4).local_units(2) == 1


def test_units_stay_whole():
    assert Parallel(1, 2).local_slice(12, 4) == slice(6, 12)
    with pytest.raises(ValueError, match="--tp-size 2"):
        Parallel(1, 2).local_slice(12, 3)


def test_padding():
    owned = [range(10)[Parallel(r, 4).padded_slice(10)] for r in range(4)]
    assert [len(o) for o in owned] == [3, 3, 3, 1]
    assert Parallel(0, 4).padded(10) == 12
    assert Parallel(3, 4).padded_slice(3) == slice(3, 3)
