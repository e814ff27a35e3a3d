"""The model of one rank: loads it, owns its KV and adapters, runs steps. Knows no request, only plans."""

import logging
import time
from collections.abc import Callable

import numpy as np
import torch

from loraplex.engine.batch import ForwardContext, StepPlan
from loraplex.engine.config import NO_LIMIT, Config
from loraplex.engine.device import upload
from loraplex.engine.graphs import (
    Bucket,
    StepGraphs,
    decode_sizes,
    reason_against,
    token_sizes,
)
from loraplex.engine.inputs import PageTable, StepInputs, build_inputs, known_ids
from loraplex.engine.launched import LaunchedStep, PromptLogprobs, SampledRows
from loraplex.engine.lora.backend import make_backend
from loraplex.engine.lora.pool import AdapterPool
from loraplex.engine.memory import arena_bytes, available_bytes, num_kv_pages, parameter_bytes
from loraplex.engine.model_config import DTYPES, ModelSpec, read_eos_token_ids, read_model_spec
from loraplex.engine.models import build_model
from loraplex.engine.models.decoder import CausalLM
from loraplex.engine.parallel import Parallel
from loraplex.engine.request import SamplingParams
from loraplex.engine.sampler import Sampled, Sampler, top_logprobs
from loraplex.engine.step import SampleRow, SamplingPlan
from loraplex.engine.weights import init_dummy, load_weights
from loraplex.kernels.attention.paged import MAX_HEAD_DIM
from loraplex.kernels.devices import INTERPRETED
from loraplex.kernels.lora.batch_info import LoRABatchInfo
from loraplex.kernels.lora.experts import expert_lora_op
from loraplex.kernels.moe.tiles import rank_capacity

log = logging.getLogger(__name__)

WARM_PROMPTS = (8, 15, 100, 257, 512, 1000)
WARM_DECODES = (1, 2, 15, 16, 63, 64, 129, 256)
"""Both sides of each change of kernel form and of divisibility by 16, for which Triton compiles anew."""
WARM_MIXED = ((9, 1), (600, 128))
"""Prompt tokens, and rows of one token beside them: both tiles of prefill and both forms of joining split rows."""
PROMPT_LOGITS_ROWS = 256
"""Prompt positions whose logits exist at once: in fp32, 256 × 151,936 × 4 bytes = 155 MB."""
MOST_LOGPROBS = 20
"""Alternatives that the API gives at most."""
HEAVY_SAMPLING = SamplingParams(
    max_tokens=1, top_p=0.9, top_k=50, min_p=0.01, presence_penalty=1.0, logprobs=MOST_LOGPROBS
)
"""What takes most memory to sample."""
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
SMALL_DEVICE = 40 << 30
MOST_GRAPH_TOKENS = 8192
"""Prompt tokens of the largest graph by default: a larger step keeps the GPU busy longer than its launches take."""


class ModelRunner:
    """One rank's model. Every rank calls the same methods in the same order with the same plans."""

    def __init__(
        self,
        config: Config,
        parallel: Parallel,
        device: torch.device,
        say: Callable[[str], None],
        *,
        static_steps: bool = False,
    ) -> None:
        """static_steps: a CPU, too, runs steps in the static buffers that a GPU's graphs replay."""
        self.config = config
        self._say = say
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
        self.pages = PageTable(
            self.max_rows,
            -(-self.context_length // self.page_size),
            self.page_size,
            config.model.attention_backend,
        )
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
        self._static_steps = static_steps
        self.graphs = self._new_graphs()

    @property
    def prompt_budget(self) -> int:
        """Prompt tokens of one step. Without a limit, on CUDA, those of one whole prompt: memory for a step is set
        aside at start, and no share of it would do for any number of prompts at once."""
        budget = self.config.scheduler.prefill_budget
        return self.context_length if budget == NO_LIMIT and self.device.type == "cuda" else budget

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
        """Sizes and allocates the KV pool, after weights and start-up adapters; all ranks get the same pages. On CUDA
        what the largest step and the graphs take is measured first."""
        try:
            reserved = self._measure() if self.device.type == "cuda" else 0
        except torch.OutOfMemoryError as error:
            raise ValueError(
                f"the largest step, {sum(self._largest_step())} tokens, does not fit beside weights and adapters; "
                "lower --chunked-prefill-size or --max-running-requests, or give less to --lora-memory"
            ) from error
        available = available_bytes(self.device, self.config.cache.mem_fraction_static) - reserved
        most = self.max_rows * self.context_length
        pages = num_kv_pages(self.config.cache, self._kv_bytes_per_token(), available, most)
        pages = int(self.parallel.all_gather_last(torch.tensor([pages], device=self.device)).min())
        self.kv = self._new_kv(pages)
        self.memory_table.append(("KV pool", pages * self.page_size * self._kv_bytes_per_token()))
        return pages

    def warm_up(self) -> None:
        """The first real forwards, prompts and decodes, before anyone is told that the server is ready. On CUDA in all
        sizes for which other kernels are chosen, with and without adapters: a kernel's first use compiles it, which
        takes half a second that no request should wait for. Then the graphs."""
        pages = self.kv[0][0].shape[0] // self.page_size
        cuda = self.device.type == "cuda"
        largest = min(self.context_length, self.prompt_budget, pages * self.page_size)
        prompts = {min(n, largest) for n in (WARM_PROMPTS if cuda else WARM_PROMPTS[:1])} | (
            {largest} if cuda else set()
        )
        decodes = {min(n, self.max_rows, pages) for n in (WARM_DECODES if cuda else WARM_DECODES[:1])}
        mixed = [[min(n, largest)] + [1] * min(m, self.max_rows - 1) for n, m in WARM_MIXED] if cuda else []
        mixed = [plan for plan in mixed if sum(-(-n // self.page_size) for n in plan) <= pages]
        for plan in [[n] for n in sorted(prompts)] + [[1] * n for n in sorted(decodes)] + mixed:
            for slot in (-1, 0) if self.config.lora.enable_lora else (-1,):
                self._probe(self._probe_plan(plan, slot))
        if cuda:
            self._warm_sampling(sorted(decodes))
        try:
            self._capture_graphs()
        except torch.OutOfMemoryError as error:
            raise ValueError(
                "CUDA graphs do not fit beside the KV pool: lower --mem-fraction-static, --cuda-graph-max-bs or "
                "--cuda-graph-max-tokens"
            ) from error

    @torch.inference_mode()
    def _warm_sampling(self, sizes: list[int]) -> None:
        """The head too, with adapters: it follows a graph launch by launch, so that no capture compiles it."""
        for n in sizes:
            hidden_ND = torch.zeros(n, self.spec.hidden_size, dtype=self.dtype, device=self.device)
            for params in (GREEDY, SamplingParams(max_tokens=1), HEAVY_SAMPLING):
                self._sample_alike(hidden_ND, params)
            if self.config.lora.enable_lora:
                self.model.logits(hidden_ND, self._plan_lora([0] * n, [1] * n, [0]))

    def _capture_graphs(self) -> None:
        if self.graphs is None:
            return
        before, began = _used_bytes(self.device), time.monotonic()
        buckets = self._startup_buckets(self.graphs)
        for i, bucket in enumerate(buckets):
            if i % -(-len(buckets) // 10) == 0 and self.device.type == "cuda":
                self._say(f"capturing CUDA graphs: {i} of {len(buckets)}")
            self.graphs.capture(bucket)
        if self.device.type == "cuda":
            words = f"CUDA graphs ({len(buckets)} in {time.monotonic() - began:.0f} s)"
            self.memory_table.append((words, _used_bytes(self.device) - before))

    def _startup_buckets(self, graphs: StepGraphs) -> list[Bucket]:
        capacities = [0]
        if self.config.lora.enable_lora:
            capacities.append(rank_capacity(max(self.adapters.ranks.values(), default=1)))
        # Largest first, whatever the capacity.
        return [bucket for pair in zip(*map(graphs.buckets, reversed(capacities))) for bucket in pair]

    def _new_graphs(self) -> StepGraphs | None:
        settings = self.config.graphs
        cuda = self.device.type == "cuda"
        if settings.disable_cuda_graph or not (cuda or self._static_steps):
            return None
        reason = reason_against(self.config, self.dtype) if cuda else None
        if reason is not None:
            log.warning("no CUDA graphs: %s; steps are launched kernel by kernel", reason)
            return None
        small = cuda and torch.cuda.get_device_properties(self.device).total_memory < SMALL_DEVICE
        largest_bs = min(settings.cuda_graph_max_bs or (64 if small else 512), self.max_rows)
        largest_step = min(self.prompt_budget, MOST_GRAPH_TOKENS) + self.max_rows
        tokens = max(min(settings.cuda_graph_max_tokens or largest_step, largest_step), largest_bs)
        return StepGraphs(
            self._run_model,
            self.pages,
            self.lora,
            torch.zeros(tokens, self.spec.hidden_size, dtype=self.dtype, device=self.device),
            decode=decode_sizes(largest_bs),
            tokens=token_sizes(tokens),
            alone=self.parallel.size == 1,
        )

    def _measure(self) -> int:
        """Bytes that must stay free beside the KV pool: the largest step that can be admitted, with the largest rank
        and everything a sampler can be asked, and the graphs."""
        rows = self._largest_step()
        torch.cuda.empty_cache()
        start = torch.cuda.memory_reserved(self.device)
        self.kv = self._new_kv(sum(-(-n // self.page_size) for n in rows))
        before = torch.cuda.memory_reserved(self.device)
        self._run_largest(rows)
        # What the allocator has taken from the device: more than the tensors, by what lies in pieces between them.
        activations = torch.cuda.memory_reserved(self.device) - before
        self.memory_table.append(("activations", activations))
        graphs = self._measure_graphs() if self.graphs is not None else 0
        self.kv = []
        torch.cuda.empty_cache()
        kept = torch.cuda.memory_reserved(self.device) - start
        return activations - kept + graphs

    def _largest_step(self) -> list[int]:
        """New tokens of each row: the prompt budget in as few rows as the context allows, the other rows decoding."""
        prompt = self.prompt_budget
        rows = [min(self.context_length, prompt - start) for start in range(0, prompt, self.context_length)]
        return (rows + [1] * self.max_rows)[: self.max_rows]

    @torch.inference_mode()
    def _run_largest(self, rows: list[int]) -> None:
        plan = self._probe_plan(rows)
        self.pages.update(plan)
        lora = capacity = None
        if self.config.lora.enable_lora:
            capacity = rank_capacity(self.config.lora.max_lora_rank)
            lora = self.lora.static(len(plan.ids), len(rows), self.device, capacity).info
        hidden_TD = self._run_model(build_inputs(plan, self.pages, self.device), lora, capacity)
        logits_NV = self.model.logits(hidden_TD[:PROMPT_LOGITS_ROWS])
        top_logprobs(logits_NV, logits_NV.argmax(-1), MOST_LOGPROBS)
        del logits_NV
        self.sampler.start_row(0, HEAVY_SAMPLING, [0], [])
        self._sample_alike(hidden_TD[: len(rows)], HEAVY_SAMPLING)

    def _sample_alike(self, hidden_ND: torch.Tensor, params: SamplingParams) -> None:
        rows = [SampleRow(i, params, seed=0, position=0) for i in range(len(hidden_ND))]
        self.sampler.sample(self.model.logits(hidden_ND), rows)

    def _measure_graphs(self) -> int:
        """Bytes that the start-up graphs will take: the largest one, whose memory all share, and what each further
        one adds. Captured over a KV pool that is given back: the real one is as large as the rest of the memory."""
        assert self.graphs is not None
        buckets = self._startup_buckets(self.graphs)
        start = _used_bytes(self.device)
        self.graphs.capture(buckets[0])
        first = _used_bytes(self.device)
        for bucket in buckets[-4:]:
            self.graphs.capture(bucket)
        each = (_used_bytes(self.device) - first) // min(4, len(buckets))
        self.graphs.clear()
        return first - start + each * len(buckets)

    def _probe(self, plan: StepPlan) -> None:
        self.pages.update(plan)
        self._run_eagerly(plan)

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
            first_page=[0] * rows,
            new_pages=pages,
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
    def launch(
        self, plan: StepPlan, sampling: SamplingPlan | None, poison: frozenset[int] = frozenset()
    ) -> LaunchedStep:
        """Starts a step, which runs in order behind those launched before, and does not wait for the device. Rank 0
        passes `sampling`; other ranks pass None, and what they get holds nothing.

        `poison`: indices of plan rows whose logits a test wants to be NaN.
        """
        self.pages.update(plan)
        for new in sampling.new_rows if sampling is not None else ():
            self.sampler.start_row(new.row, new.params, new.prompt_ids, new.output_ids)
        inputs, hidden_TD = self._forward(plan)
        step = LaunchedStep(len(plan.rows))
        end = 0
        for i, num_new in enumerate(plan.num_new):
            end += num_new
            if plan.prompt_logprobs[i] >= 0:
                targets = sampling.prompt_targets[i] if sampling is not None else []
                step.prompts += self._prompt_logprobs(hidden_TD[end - num_new : end], plan, i, targets)
        at = [i for i, sample in enumerate(plan.sample) if sample]
        if at:
            drawn = self._sample(hidden_TD, inputs, plan, at, sampling, poison)
            if drawn is not None and sampling is not None:
                step.sampled = SampledRows(at, drawn.fetch(), [r.params.logprobs for r in sampling.rows])
        if self.device.type == "cuda" and sampling is not None:
            step.done = torch.cuda.Event()
            step.done.record()
        return step

    def _forward(self, plan: StepPlan) -> tuple[StepInputs, torch.Tensor]:
        """Hidden states of the step's tokens, perhaps followed by padding; they are valid until the next forward."""
        ran = self.graphs.run(plan, self.adapters.ranks) if self.graphs is not None else None
        return ran if ran is not None else self._run_eagerly(plan)

    def _run_eagerly(self, plan: StepPlan) -> tuple[StepInputs, torch.Tensor]:
        inputs = build_inputs(plan, self.pages, self.device)
        return inputs, self._run_model(inputs, self._plan_lora(plan.slots, plan.num_new, plan.slot_rows), None)

    def _run_model(self, inputs: StepInputs, lora: LoRABatchInfo | None, capacity: int | None) -> torch.Tensor:
        ctx = ForwardContext(inputs.positions_T, inputs.attn, self.kv, lora, capacity)
        with torch.inference_mode():
            hidden: torch.Tensor = self.model(known_ids(inputs.ids_T, self.last_token), ctx)
        return hidden

    def _plan_lora(self, slots: list[int], num_tokens: list[int], slot_rows: list[int]) -> LoRABatchInfo | None:
        """None when no token has an adapter: then no LoRA code runs at all."""
        if not slot_rows or all(slot < 0 for slot in slots):
            return None
        return self.lora.plan(slots, num_tokens, slot_rows, self.adapters.ranks, self.device)

    def _plan_head_lora(self, slots: list[int], num_tokens: list[int], slot_rows: list[int]) -> LoRABatchInfo | None:
        """As `_plan_lora`, for the rows whose logits are wanted; None also when no adapter touches the head, which
        for base rows is the same, bit for bit."""
        weights = self.model.lm_head.lora
        if weights is None or not any(weights.touches(row) for row in slot_rows):
            return None
        return self._plan_lora(slots, num_tokens, slot_rows)

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
        lora = self._plan_head_lora([plan.slots[i] for i in at], [1] * len(at), plan.slot_rows)
        hidden_ND = hidden_TD[inputs.sample_at_B[: len(at)]]
        logits_NV = self.model.logits(hidden_ND, lora)  # a collective: every rank takes part
        sampled = None
        if sampling is not None:
            for n, i in enumerate(at):
                if i in poison:
                    logits_NV[n] = torch.nan
            sampled = self.sampler.sample(logits_NV, sampling.rows)
        rows_N = inputs.sample_rows_B[: len(at)]
        ids_N = sampled.ids_N if sampled is not None else torch.zeros_like(rows_N)
        self.last_token.index_copy_(0, rows_N, self.parallel.broadcast_(ids_N))
        return sampled

    def _prompt_logprobs(
        self, hidden_ND: torch.Tensor, plan: StepPlan, i: int, targets: list[int]
    ) -> list[PromptLogprobs]:
        """Logprobs of each position's next prompt token; `targets` may be shorter than the chunk by its last one."""
        parts: list[PromptLogprobs] = []
        k = plan.prompt_logprobs[i]
        for start in range(0, len(hidden_ND), PROMPT_LOGITS_ROWS):
            hidden = hidden_ND[start : start + PROMPT_LOGITS_ROWS]
            logits = self.model.logits(hidden, self._plan_head_lora([plan.slots[i]], [len(hidden)], plan.slot_rows))
            tokens = targets[start : start + PROMPT_LOGITS_ROWS]
            if tokens:
                next_N = upload(np.asarray(tokens, dtype=np.int64), self.device)
                top = top_logprobs(logits[: len(tokens)], next_N, k)
                parts.append(PromptLogprobs(i, tokens, k, top.fetch()))
        return parts


def _used_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free


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
