"""Rotary position embedding: the angles, once per step, and all that happens between the qkv projection and the
attention, in one launch. R rotated pairs per head."""

import torch

from loraplex.kernels.attention.reference import FP8, store_kv_reference
from loraplex.kernels.devices import dependent_launch, use_triton
from loraplex.kernels.elementwise import rms_norm_reference
from loraplex.kernels.tuning import power_of_two

HEADS = 4
"""Heads of a program: as few as a group has, so that one token's heads fill several SMs."""
BLOCK = 1024


def rope_angles_reference(
    positions_T: torch.Tensor, inv_freq_R: torch.Tensor, factor: float
) -> tuple[torch.Tensor, torch.Tensor]:
    angles_TR = positions_T[:, None].float() * inv_freq_R
    return angles_TR.cos() * factor, angles_TR.sin() * factor


def rope_angles(
    positions_T: torch.Tensor, inv_freq_R: torch.Tensor, factor: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin) of positions × frequencies, times `factor`: each fp32 [T, R]."""
    if not use_triton(inv_freq_R):
        return rope_angles_reference(positions_T, inv_freq_R, factor)
    from loraplex.kernels import _triton_elementwise as kernels

    tokens, half = positions_T.shape[0], inv_freq_R.shape[0]
    cos_TR, sin_TR = inv_freq_R.new_empty(2, tokens, half).unbind(0)
    total = tokens * half
    if total == 0:
        return cos_TR, sin_TR
    pdl = dependent_launch(inv_freq_R.device)
    kernels.rope_angles[(-(-total // BLOCK),)](
        positions_T, inv_freq_R, cos_TR, sin_TR, total, FACTOR=factor, HALF=half, BLOCK=BLOCK, num_warps=4, **pdl
    )
    return cos_TR, sin_TR


def rotate(x_THD: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor) -> torch.Tensor:
    """Turns the pairs (x[i], x[i + R]) of each head, i < R ≤ D/2, by their angles; what lies beyond 2R stays."""
    half = cos_TR.shape[1]
    low, high = x_THD[..., :half].float(), x_THD[..., half : 2 * half].float()
    cos, sin = cos_TR[:, None], sin_TR[:, None]
    turned = torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x_THD.dtype)
    return turned if 2 * half == x_THD.shape[-1] else torch.cat((turned, x_THD[..., 2 * half :]), dim=-1)


def norm_rotate_store_reference(
    qkv_TN: torch.Tensor,
    cos_TR: torch.Tensor,
    sin_TR: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping_T: torch.Tensor,
    q_weight_D: torch.Tensor | None,
    k_weight_D: torch.Tensor | None,
    eps: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    num_kv_heads, dim = k_cache.shape[1:]
    heads_THD = qkv_TN.unflatten(1, (-1, dim))
    q_THD, k_THD, v_THD = heads_THD.split((heads_THD.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads), dim=1)
    if q_weight_D is not None and k_weight_D is not None:
        q_THD, k_THD = rms_norm_reference(q_THD, q_weight_D, eps), rms_norm_reference(k_THD, k_weight_D, eps)
    k_THD = rotate(k_THD, cos_TR, sin_TR)
    store_kv_reference(k_THD, v_THD, k_cache, v_cache, slot_mapping_T.long(), k_scale, v_scale)
    return rotate(q_THD, cos_TR, sin_TR)


def norm_rotate_store(
    qkv_TN: torch.Tensor,
    cos_TR: torch.Tensor,
    sin_TR: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping_T: torch.Tensor,
    *,
    q_weight_D: torch.Tensor | None = None,
    k_weight_D: torch.Tensor | None = None,
    eps: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    """Norms q and k head by head (when weights are given), rotates both, stores k and v. Returns q, [T, H, D].

    qkv: [T, (H + 2 H_kv) · D], q heads first, rows contiguous. Caches: [slots, H_kv, D] of one dtype, heads and
    elements contiguous; cache[slot_mapping[t]] = k / k_scale, v / v_scale of token t, rounded to the cache's dtype
    (e4m3 saturates), none for a slot of −1 (padding). cos and sin as `rope_angles` gives them; a norm rounds to qkv's
    dtype before its weight and after it, the rotation once, as the references do.
    """
    num_kv_heads, dim = k_cache.shape[1:]
    num_heads = qkv_TN.shape[1] // dim - 2 * num_kv_heads
    assert num_heads > 0, (qkv_TN.shape, k_cache.shape)
    assert qkv_TN.shape[1] == (num_heads + 2 * num_kv_heads) * dim, (qkv_TN.shape, k_cache.shape)
    assert k_cache.dtype == v_cache.dtype, (k_cache.dtype, v_cache.dtype)
    assert (q_weight_D is None) == (k_weight_D is None), "q and k are normed alike"
    if not use_triton(qkv_TN):
        return norm_rotate_store_reference(
            qkv_TN, cos_TR, sin_TR, k_cache, v_cache, slot_mapping_T, q_weight_D, k_weight_D, eps, k_scale, v_scale
        )
    from loraplex.kernels import _triton_rotary as kernels

    assert qkv_TN.stride(1) == 1, "rows must be contiguous"
    assert k_cache.stride() == v_cache.stride(), (k_cache.stride(), v_cache.stride())
    assert k_cache.stride()[1:] == (dim, 1), k_cache.stride()
    tokens, half = qkv_TN.shape[0], cos_TR.shape[1]
    q_THD = qkv_TN.new_empty(tokens, num_heads, dim)
    if tokens == 0:
        return q_THD
    kernels.norm_rotate_store[(tokens, -(-num_heads // HEADS) + 2 * -(-num_kv_heads // HEADS))](
        qkv_TN,
        q_THD,
        cos_TR,
        sin_TR,
        k_cache,
        v_cache,
        slot_mapping_T,
        q_weight_D,
        k_weight_D,
        1 / k_scale,
        1 / v_scale,
        EPS=eps,
        QKV_ROW=qkv_TN.stride(0),
        CACHE_ROW=k_cache.stride(0),
        Q_HEADS=num_heads,
        KV_HEADS=num_kv_heads,
        DIM=dim,
        HALF=half,
        BLOCK_H=HEADS,
        BLOCK_R=power_of_two(half),
        BLOCK_REST=power_of_two(dim - 2 * half) if dim > 2 * half else 0,
        BLOCK_D=power_of_two(dim),
        FP8=k_cache.dtype == FP8,
        num_warps=1 if tokens <= 64 else 2,
        **dependent_launch(qkv_TN.device),
    )
    return q_THD
