"""Token → adapter slot, through requests. The reference; a step needs it once, every layer reads the result."""

import torch


def expand_token_slot(req_seg_indptr: torch.Tensor, req_weight_indices: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Slot of each token, int32 [num_tokens].

    Semantics: token t belongs to the request i with indptr[i] ≤ t < indptr[i + 1]; its slot is weights[i]. Tokens from
    indptr[-1] on are padding and get −1. req_seg_indptr int32 [B + 1], req_weight_indices int32 [B]. Example: indptr
    [0, 2, 3], weights [4, −1], 5 tokens → [4, 4, −1, −1, −1]. Requests of length 0 own no token.
    """
    tokens = torch.arange(num_tokens, dtype=torch.int32, device=req_seg_indptr.device)
    request = torch.searchsorted(req_seg_indptr[1:], tokens, right=True)
    padded = torch.cat([req_weight_indices, req_weight_indices.new_full((1,), -1)])
    return padded[request]
