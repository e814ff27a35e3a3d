"""The reference against a softmax written out, over a cache that is NaN wherever nothing was stored."""

import pytest
import torch
from kit.attention import make_step

ROWS = {
    "decode": [(1, 1), (1, 9), (1, 33)],
    "prefill": [(12, 12), (5, 20), (2, 2)],
    "mixed": [(1, 7), (6, 30), (1, 1), (17, 17), (1, 18)],
}


def check(step, **options):
    out = step.run(**options)
    torch.testing.assert_close(out[: step.tokens], step.expected(**options), atol=2e-6, rtol=1e-5)
    assert (out[step.tokens :] == 0).all()


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("window", [None, 1, 7, 100])
def test_paged_attention(page_size, rows, window):
    check(make_step(ROWS[rows], page_size=page_size), window=window)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("window", [None, 7])
def test_sinks(rows, window):
    check(make_step(ROWS[rows]), window=window, sinks_H=torch.tensor([0.0, -3.0, 5.0, 1.0, 40.0, -90.0]))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("padding", [(2, 2), (3, 0), (0, 4)])
def test_padding_gives_zeros_and_is_not_stored(rows, padding):
    check(make_step(ROWS[rows], padding_rows=padding[0], padding_tokens=padding[1]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_a_cache_of_another_dtype_counts_as_what_it_holds(dtype):
    check(make_step(ROWS["mixed"], cache_dtype=dtype, scales=(0.5, 0.25)))


def test_values_too_large_for_8_bits_saturate():
    step = make_step([(3, 3)], cache_dtype=torch.float8_e4m3fn, scales=(1e-3, 1e-3))
    assert step.run().isfinite().all()
    assert step.v_cache[step.plan.slot_mapping_T].float().abs().max() == 448
