"""`sampling.draw` and `log_normaliser` in Triton's interpreter against the references."""

import pytest
import torch
from kit.draws import WAYS, check_draws, draw_params

from loraplex.kernels import sampling

pytestmark = pytest.mark.usefixtures("interpreter")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks in a chunk, several chunks in a row, and none of them whole."""
    monkeypatch.setattr(sampling, "BLOCK", 64)
    monkeypatch.setattr(sampling, "SHORT_CHUNK", 128)
    monkeypatch.setattr(sampling, "LONG_CHUNK", 256)
    monkeypatch.setattr(sampling, "LISTED", 32)


def logits(rows: int, size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("size", [1, 50, 300, 777])
def test_every_way_in_one_batch(size: int) -> None:
    assert check_draws(logits(len(WAYS), size, size), draw_params(WAYS, "cpu", size)) == 0


@pytest.mark.parametrize("scale", [1.0, 0.0, 1e-6])
def test_many_equal_logits(scale: float) -> None:
    """Of equal logits at the end of the kept set the first ones stay."""
    x = (logits(len(WAYS), 400).round() * scale).contiguous()
    assert check_draws(x, draw_params(WAYS, "cpu", 3)) == 0


@pytest.mark.parametrize("way", WAYS)
def test_a_batch_of_one_way(way: tuple[float, int, float, float]) -> None:
    wide = logits(2, 210, 7)
    assert check_draws(wide[:, :200], draw_params([way] * 2, "cpu", 7)) == 0


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    x, params = logits(len(WAYS), 300), draw_params(WAYS, "cpu")
    together, _ = sampling.draw(x, params)
    fields = {name: value for name, value in vars(params).items() if name.endswith("_N")}
    for i, (t, k, p, m) in enumerate(WAYS):
        one = {name: value[i : i + 1] for name, value in fields.items()}
        alone = sampling.DrawParams(**one, noisy=t > 0, cut=t > 0 and (k > 0 or p < 1 or m > 0))
        assert sampling.draw(x[i : i + 1].contiguous(), alone)[0].tolist() == [together[i].item()]


def test_few_finite_logits() -> None:
    x = torch.full((len(WAYS), 200), -torch.inf)
    x[:, 150], x[:, 3] = 1.0, 0.5
    assert check_draws(x, draw_params(WAYS, "cpu")) == 0


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_broken_rows_are_found_and_end() -> None:
    x = logits(len(WAYS), 200)
    x[::2, 7] = torch.nan
    x[1::4, 199] = torch.inf
    x[3::4] = -torch.inf
    check_draws(x, draw_params(WAYS, "cpu"))


def test_log_normaliser() -> None:
    x = logits(20, 333) * 10
    x[0, :50] = -torch.inf
    torch.testing.assert_close(sampling.log_normaliser(x), torch.logsumexp(x, dim=-1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_logits_give_the_draws_of_their_values_in_fp32(dtype: torch.dtype) -> None:
    """Rounded logits have many ties, at the end of kept sets too."""
    for size in (300, 777):
        x = logits(len(WAYS), size + 3, size).to(dtype)[:, :size]
        params = draw_params(WAYS, "cpu", size)
        for got, expected in zip(sampling.draw(x, params), sampling.draw(x.float(), params), strict=True):
            assert torch.equal(got, expected)
        assert check_draws(x, params) == 0
        assert torch.equal(sampling.log_normaliser(x), sampling.log_normaliser(x.float()))
