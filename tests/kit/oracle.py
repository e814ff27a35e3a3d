"""What the right answer is: transformers in fp32, the adapter merged into the weights by hand."""

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import torch
from kit.deltas import weight_deltas
from torch import Tensor
from transformers import AutoModelForCausalLM


class Oracle:
    """HF forward of one checkpoint with any adapter. Merged models are kept: adapters here are tiny."""

    def __init__(self, model_dir: Path) -> None:
        self.model_dir = model_dir
        self.base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
        self._merged: dict[Path, Any] = {}

    def model(self, adapter_dir: Path | None = None) -> Any:
        """The HF model with the adapter merged; None is the base."""
        if adapter_dir is None:
            return self.base
        if adapter_dir not in self._merged:
            self._merged[adapter_dir] = self._merge(adapter_dir)
        return self._merged[adapter_dir]

    def forget(self, adapter_dir: Path | None) -> None:
        """Drops a model whose dtype or device a test has changed."""
        if adapter_dir is None:
            self.base = AutoModelForCausalLM.from_pretrained(self.model_dir, dtype=torch.float32).eval()
        else:
            del self._merged[adapter_dir]

    @torch.no_grad()
    def logprobs(self, ids: list[int], adapter_dir: Path | None = None) -> Tensor:
        """[T, V] log-softmax; row t is the distribution of the token after ids[t]."""
        return _logprobs(self.model(adapter_dir), ids)

    @torch.no_grad()
    def peft_logprobs(self, ids: list[int], adapter_dir: Path) -> Tensor:
        """The same through PEFT, for the layouts that PEFT reads rightly (adapter-formats A.4)."""
        from peft import PeftModel

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _logprobs(PeftModel.from_pretrained(copy.deepcopy(self.base), adapter_dir).eval(), ids)

    def greedy(
        self, ids: list[int], n: int, adapter_dir: Path | None = None, *, stop: tuple[int, ...] = ()
    ) -> list[int]:
        """The n likeliest next tokens, one by one; ends after a token of `stop` (none: eos is ignored)."""
        ids, prompt_len = list(ids), len(ids)
        while len(ids) - prompt_len < n:
            ids.append(int(self.logprobs(ids, adapter_dir)[-1].argmax()))
            if ids[-1] in stop:
                break
        return ids[prompt_len:]

    def _merge(self, adapter_dir: Path) -> Any:
        merged = copy.deepcopy(self.base)
        deltas = weight_deltas(adapter_dir, **moe_sizes(self.model_dir))
        if "model.embed_tokens.weight" in deltas:
            untie(merged)
        parameters = dict(merged.named_parameters())
        for name, delta in deltas.items():
            parameters[name].data += delta
        return merged


def untie(model: Any) -> None:
    """Gives the head a weight of its own: PEFT adapts the embedding of a tied model alone."""
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone(), requires_grad=False)


def moe_sizes(model_dir: Path) -> dict[str, int]:
    """num_experts, intermediate and hidden of a checkpoint's routed experts (zeros without experts)."""
    config = json.loads((model_dir / "config.json").read_text())
    num_experts = config.get("num_experts", config.get("num_local_experts", 0))
    return {
        "num_experts": num_experts,
        "intermediate": config.get("moe_intermediate_size", config["intermediate_size"] if num_experts else 0),
        "hidden": config["hidden_size"],
    }


def assert_logprobs_close(got: Tensor, expected: Tensor, tol: float = 1e-4) -> None:
    """Largest difference of two [T, V] log-softmax tables ≤ tol; says where it is."""
    assert got.shape == expected.shape, f"{tuple(got.shape)} != {tuple(expected.shape)}"
    error = (got.float() - expected.float()).abs()
    worst = float(error.max())
    where = divmod(int(error.argmax()), error.shape[-1])
    assert worst <= tol, f"max |dlogprob| {worst:.3g} > {tol:g} at (position, token) {where}"


def _logprobs(model: Any, ids: list[int]) -> Tensor:
    logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits
    return logits[0].float().log_softmax(-1)
