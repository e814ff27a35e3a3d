"""The model of one rank: loads it, owns its KV and adapters, runs steps. Knows no request, only plans."""

from collections.abc import Callable

import torch

from loraplex.engine.batch import ForwardContext, StepPlan
from loraplex.engine.config import Config
from loraplex.engine.inputs import StepInputs, build_inputs
from loraplex.engine.lora.backend import make_backend
from loraplex.engine.lora.pool import AdapterPool
from loraplex.engine.memory import arena_bytes, available_bytes, num_kv_pages, parameter_bytes
from loraplex.engine.messages import TokenLogprobs
from loraplex.engine.model_config import DTYPES, ModelSpec, read_eos_token_ids, read_model_spec
from loraplex.engine.models import build_model
from loraplex.engine.models.decoder import CausalLM
from loraplex.engine.parallel import Parallel
from loraplex.engine.sampler import Sampled, Sampler, top_logprobs
from loraplex.engine.step import SamplingPlan, StepResult
from loraplex.engine.weights import init_dummy, load_weights
from loraplex.kernels.attention.paged import MAX_HEAD_DIM
from loraplex.kernels.devices import INTERPRETED
from loraplex.kernels.lora.batch_info import LoRABatchInfo
from loraplex.kernels.lora.experts import expert_lora_op

WARM_PROMPTS = (8, 15, 100, 257, 512, 1000)
WARM_DECODES = (1, 2, 15, 16, 63, 64, 129, 256)
"""Both sides of each change of kernel form and of divisibility by 16, for which Triton compiles anew."""
WARM_MIXED = ((9, 1), (600, 128))
"""Prompt tokens, and rows of one token beside them: both tiles of prefill and both forms of joining split rows."""
PROMPT_LOGITS_ROWS = 256
"""Prompt positions whose logits exist at once: 256 × 151,936 × 4 bytes = 155 MB."""


class ModelRunner:
    """One rank's model. Every rank calls the same methods in the same order with the same plans."""

    def __init__(self, config: Config, parallel: Parallel, device: torch.device, say: Callable[[str], None]) -> None:
        self.config = config
        self.parallel = parallel
        self.device = device
        self.spec = read_model_spec(config.model.model_path)
        self.eos_token_ids = read_eos_token_ids(config.model.model_path, self.spec.vocab_size)
        self.dtype = _resolve_dtype(config.model.dtype, self.spec.dtype, device)
        self.kv_dtype = _resolve_kv_dtype(config.cache.kv_cache_dtype, self.dtype, device)
        _check_attention(config.model.attention_backend, self.spec, device)
        self.context_length = _context_length(config.model.context_length, self.spec.context_length)
        self.memory_table: list[tuple[str, int]] = []
        self.kv: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.page_size = config.cache.page_size
        self.max_rows = config.scheduler.max_running_requests
        self.last_token = torch.zeros(self.max_rows, dtype=torch.int64, device=device)
        self.sampler = Sampler(
            self.spec.vocab_size,
            self.max_rows,
            device,
            config.model.logprobs_mode,
            frozenset(self.eos_token_ids),
        )
        say(f"loading {self.spec.architecture} ({str(self.dtype).removeprefix('torch.')}) on {device}")
        self.model = self._load()
        self.memory_table.append(("weights", parameter_bytes(self.model)))
        self.lora = make_backend(config.lora, device)
        self.adapters = AdapterPool(
            self.model,
            device,
            self.dtype,
            dense_op=self.lora.add_,
            expert_op=expert_lora_op(config.lora.lora_use_virtual_experts),
        )

    def _load(self) -> CausalLM:
        model = build_model(self.spec, self.parallel, self.dtype, self.device)
        if self.config.model.load_format == "dummy":
            init_dummy(model, self.config.model.random_seed)
        else:
            load_weights(model, self.config.model.model_path, self.parallel, progress=self.parallel.rank == 0)
        return model

    # ---- memory

    def allocate_arena(self, startup: list[int]) -> None:
        """Sizes and allocates the adapter arena, after weights, before KV; all ranks get the same size.

        startup: bytes of each start-up adapter on one rank.
        """
        lora = self.config.lora
        available = available_bytes(self.device, self.config.cache.mem_fraction_static)
        size = arena_bytes(lora.memory_bytes, startup, available, self.device)
        size = int(self.parallel.all_gather_last(torch.tensor([size], device=self.device)).min())
        try:
            self.adapters.allocate(size, lora.table_rows)
        except RuntimeError as error:
            raise ValueError(f"--lora-memory: {size} bytes cannot be had on {self.device}") from error

    def allocate_kv(self) -> int:
        """Sizes and allocates the KV pool, after weights and start-up adapters; all ranks get the same pages."""
        self._measure_activations()
        available = available_bytes(self.device, self.config.cache.mem_fraction_static)
        most = self.max_rows * self.context_length
        pages = num_kv_pages(self.config.cache, self._kv_bytes_per_token(), available, most)
        pages = int(self.parallel.all_gather_last(torch.tensor([pages], device=self.device)).min())
        self.kv = self._new_kv(pages)
        self.memory_table.append(("KV pool", pages * self.page_size * self._kv_bytes_per_token()))
        return pages

    def warm_up(self) -> None:
        """The first real forwards, prompts and decodes, before anyone is told that the server is ready. On CUDA in all
        sizes for which other kernels are chosen, with and without adapters: a kernel's first use compiles it, which
        takes half a second that no request should wait for."""
        pages = self.kv[0][0].shape[0] // self.page_size
        cuda = self.device.type == "cuda"
        largest = min(self.context_length, self.config.scheduler.prefill_budget, pages * self.page_size)
        prompts = {min(n, largest) for n in (WARM_PROMPTS if cuda else WARM_PROMPTS[:1])} | (
            {largest} if cuda else set()
        )
        decodes = {min(n, self.max_rows, pages) for n in (WARM_DECODES if cuda else WARM_DECODES[:1])}
        mixed = [[min(n, largest)] + [1] * min(m, self.max_rows - 1) for n, m in WARM_MIXED] if cuda else []
        mixed = [plan for plan in mixed if sum(-(-n // self.page_size) for n in plan) <= pages]
        for plan in [[n] for n in sorted(prompts)] + [[1] * n for n in sorted(decodes)] + mixed:
            for slot in (-1, 0) if self.config.lora.enable_lora else (-1,):
                self._forward(self._probe_plan(plan, slot))

    def _measure_activations(self) -> None:
        """On CUDA, notes the peak of a full prompt chunk, so that KV does not take what a step needs."""
        if self.device.type != "cuda":
            return
        before = torch.cuda.memory_allocated(self.device)
        tokens = min(self.context_length, self.config.scheduler.prefill_budget)
        self.kv = self._new_kv(-(-tokens // self.page_size))
        torch.cuda.reset_peak_memory_stats(self.device)
        self._forward(self._probe_plan([tokens]))
        self.kv = []
        # The caching allocator keeps the peak reserved: mem_get_info counts it as used, and steps reuse it.
        self.memory_table.append(("activations", torch.cuda.max_memory_allocated(self.device) - before))

    def _probe_plan(self, num_new: list[int], slot: int = -1) -> StepPlan:
        """Fresh sequences of so many tokens, all of the base or all of table row 0, whoever lives there."""
        first_page, pages = 0, []
        for n in num_new:
            pages.append(list(range(first_page, first_page + -(-n // self.page_size))))
            first_page += len(pages[-1])
        rows = len(num_new)
        return StepPlan(
            is_decode=all(n == 1 for n in num_new),
            rows=list(range(rows)),
            num_new=num_new,
            seq_lens=num_new,
            ids=[i % self.spec.vocab_size for i in range(sum(num_new))],
            pages=pages,
            slots=[slot] * rows,
            slot_rows=[0] if slot == 0 else [],
            sample=[True] * rows,
            prompt_logprobs=[-1] * rows,
        )

    def _new_kv(self, pages: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        shape = self.spec.kv_shape(pages * self.page_size, self.parallel)
        return [
            (
                torch.zeros(shape, dtype=self.kv_dtype, device=self.device),
                torch.zeros(shape, dtype=self.kv_dtype, device=self.device),
            )
            for _ in range(self.spec.num_layers)
        ]

    def _kv_bytes_per_token(self) -> int:
        _, heads, dim = self.spec.kv_shape(1, self.parallel)
        return 2 * self.spec.num_layers * heads * dim * self.kv_dtype.itemsize

    # ---- steps

    @torch.inference_mode()
    def execute(
        self, plan: StepPlan, sampling: SamplingPlan | None, poison: frozenset[int] = frozenset()
    ) -> StepResult:
        """Runs a step. Rank 0 passes `sampling` and gets the result; other ranks pass None and get an empty one.

        `poison`: indices of plan rows whose logits a test wants to be NaN.
        """
        for new in sampling.new_rows if sampling is not None else ():
            self.sampler.start_row(new.row, new.params, new.prompt_ids, new.output_ids)
        inputs, hidden_TD = self._forward(plan)
        result = StepResult(
            tokens=[-1] * len(plan.rows),
            broken=[False] * len(plan.rows),
            logprobs=[None] * len(plan.rows),
            prompt_logprobs=[[] for _ in plan.rows],
        )
        for i in range(len(plan.rows)):
            if plan.prompt_logprobs[i] >= 0:
                end = sum(plan.num_new[: i + 1])
                targets = sampling.prompt_targets[i] if sampling is not None else None
                hidden_ND = hidden_TD[end - plan.num_new[i] : end]
                result.prompt_logprobs[i] = self._prompt_logprobs(hidden_ND, plan, i, targets)
        at = [i for i, sample in enumerate(plan.sample) if sample]
        if at:
            sampled = self._sample(hidden_TD, inputs, plan, at, sampling, poison)
            if sampled is not None and sampling is not None:
                _fill(result, at, sampled, sampling)
        return result

    def _forward(self, plan: StepPlan) -> tuple[StepInputs, torch.Tensor]:
        inputs = build_inputs(plan, self.page_size, self.last_token, self.device, self.config.model.attention_backend)
        ctx = ForwardContext(
            positions_T=inputs.positions_T,
            attn=inputs.attn,
            kv=self.kv,
            lora=self._plan_lora(plan.slots, plan.num_new, plan.slot_rows),
        )
        with torch.inference_mode():
            hidden: torch.Tensor = self.model(inputs.ids_T, ctx)
        return inputs, hidden

    def _plan_lora(self, slots: list[int], num_tokens: list[int], slot_rows: list[int]) -> LoRABatchInfo | None:
        """None when no token has an adapter: then no LoRA code runs at all."""
        if not slot_rows or all(slot < 0 for slot in slots):
            return None
        return self.lora.plan(slots, num_tokens, slot_rows, self.adapters.ranks, self.device)

    def _sample(
        self,
        hidden_TD: torch.Tensor,
        inputs: StepInputs,
        plan: StepPlan,
        at: list[int],
        sampling: SamplingPlan | None,
        poison: frozenset[int],
    ) -> Sampled | None:
        """Rank 0 draws; all ranks keep the ids in the rows' last-token buffer."""
        at_N = torch.tensor(at, device=self.device)
        lora = self._plan_lora([plan.slots[i] for i in at], [1] * len(at), plan.slot_rows)
        logits_NV = self.model.logits(hidden_TD[inputs.last_B[at_N]], lora)  # a collective: every rank takes part
        sampled = None
        if sampling is not None:
            for n, i in enumerate(at):
                if i in poison:
                    logits_NV[n] = torch.nan
            sampled = self.sampler.sample(logits_NV, sampling.rows)
        ids = sampled.ids_N if sampled is not None else torch.zeros_like(at_N)
        self.last_token[inputs.rows_B[at_N]] = self.parallel.broadcast_(ids)
        return sampled

    def _prompt_logprobs(
        self, hidden_ND: torch.Tensor, plan: StepPlan, i: int, targets: list[int] | None
    ) -> list[TokenLogprobs]:
        """Logprobs of each position's next prompt token; `targets` may be shorter than the chunk by its last one."""
        result: list[TokenLogprobs] = []
        k = plan.prompt_logprobs[i]
        for start in range(0, len(hidden_ND), PROMPT_LOGITS_ROWS):
            hidden = hidden_ND[start : start + PROMPT_LOGITS_ROWS]
            logits = self.model.logits(hidden, self._plan_lora([plan.slots[i]], [len(hidden)], plan.slot_rows))
            tokens = (targets or [])[start : start + PROMPT_LOGITS_ROWS]
            if tokens:
                top = top_logprobs(logits[: len(tokens)], torch.tensor(tokens, device=self.device), k)
                result += top.to_host(tokens, [k] * len(tokens))
        return result


def _fill(result: StepResult, at: list[int], sampled: Sampled, sampling: SamplingPlan) -> None:
    tokens = sampled.ids_N.tolist()
    broken = sampled.broken_N.tolist()
    counts = [r.params.logprobs for r in sampling.rows]
    logprobs = sampled.top.to_host(tokens, [k or 0 for k in counts]) if sampled.top is not None else None
    for n, i in enumerate(at):
        result.tokens[i] = tokens[n]
        result.broken[i] = broken[n]
        if logprobs is not None and counts[n] is not None:
            result.logprobs[i] = logprobs[n]


def _resolve_dtype(asked: str, checkpoint: torch.dtype, device: torch.device) -> torch.dtype:
    if asked == "auto":
        return torch.float32 if device.type == "cpu" else checkpoint
    return DTYPES[asked]


def _resolve_kv_dtype(asked: str, model: torch.dtype, device: torch.device) -> torch.dtype:
    if asked == "auto":
        return model
    if asked != "fp8_e4m3":
        return DTYPES[asked]
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        raise ValueError(
            f"--kv-cache-dtype fp8_e4m3 needs a GPU of compute capability 8.9 or newer (Ada, Hopper), "
            f"{torch.cuda.get_device_name(device)} is older; leave it out"
        )
    return torch.float8_e4m3fn


def _check_attention(asked: str, spec: ModelSpec, device: torch.device) -> None:
    if asked == "triton" and device.type == "cpu" and not INTERPRETED:
        raise ValueError("--attention-backend triton needs CUDA; on CPU use auto or torch")
    if spec.head_dim > MAX_HEAD_DIM:
        raise ValueError(f"config.json: head_dim {spec.head_dim} is more than attention supports ({MAX_HEAD_DIM})")


def _context_length(asked: int | None, model: int) -> int:
    if asked is not None and asked > model:
        raise ValueError(f"--context-length {asked} is more than the model's {model}")
    return model if asked is None else asked
