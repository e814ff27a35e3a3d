"""Fills a model's parameters: from safetensors, or with random numbers. Strict both ways.

Every tensor in the files must have an owner among the layers and every parameter must be filled exactly once; what
does not fit is an error naming tensor and file, never a model that runs on garbage.
"""

import hashlib
import json
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from loraplex.engine.layers.checkpoint import CheckpointTensor, TensorOwner
from loraplex.engine.models.decoder import CausalLM
from loraplex.engine.parallel import Parallel

tqdm.set_lock(threading.RLock())
"""Its own lock is a named semaphore of multiprocessing, which an engine that is ended by force would leave behind."""

HARMLESS = re.compile(r"\.rotary_emb\.inv_freq$")
"""Written by old versions of transformers; derived from config.json."""
FLOAT_DTYPES = ("F32", "BF16", "F16")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def load_weights(model: CausalLM, folder: str | Path, parallel: Parallel, progress: bool = True) -> None:
    """Reads this rank's slices of `folder`'s safetensors into `model`. Rank 0 shows a progress bar on stderr, or a line
    at start and end when stderr is no terminal.

    Raises ValueError for missing, unreadable, surplus, doubled or misshapen tensors, and for NaN or Inf in them.
    """
    loader = _Loader(model)
    files = checkpoint_files(Path(folder))
    total = sum(len(names) for names in files.values())
    shown = progress and parallel.rank == 0
    in_lines = shown and not sys.stderr.isatty()
    if in_lines:
        print(f"loading weights: {total} tensors", file=sys.stderr, flush=True)
    with tqdm(total=total, desc="loading weights", unit=" tensors", disable=not shown or in_lines) as bar:
        for path, names in files.items():
            with open_weights(path) as file:
                for name in names:
                    loader.load(path, file, name)
                    bar.update()
    loader.finish(Path(folder))
    if in_lines:
        print("loading weights: done", file=sys.stderr, flush=True)


def init_dummy(model: CausalLM, seed: int) -> None:
    """Random weights that keep activations sane: matrices of std 1 / sqrt(inputs), norms 1.

    A tensor depends on its name, the seed and the kind of device only, so ranks hold slices of one model.
    """
    for name, owned in owned_tensors(model).items():
        if owned.fills != (name,):
            continue  # fused names stand for tensors that are filled one by one
        device = owned.pieces[0].dest.device
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "little"))
        whole = torch.randn(owned.shape, generator=generator, device=device, dtype=torch.float32)
        if len(owned.shape) > 1:
            whole *= owned.shape[-1] ** -0.5
        elif name.endswith(".bias"):
            whole *= 0.02
        else:
            whole.fill_(1.0)
        for piece in owned.pieces:
            piece.dest.copy_(whole[piece.box])


def owned_tensors(model: CausalLM) -> dict[str, CheckpointTensor]:
    """Every checkpoint name the model's layers accept."""
    tensors: dict[str, CheckpointTensor] = {}
    for path, layer in model.named_modules():
        if isinstance(layer, TensorOwner):
            tensors.update(layer.checkpoint_tensors(path))
    return tensors


class _Loader:
    """Copies tensors to their owners and remembers what was filled, by which."""

    def __init__(self, model: CausalLM) -> None:
        self.model = model
        self.owned = owned_tensors(model)
        self.filled_by: dict[str, str] = {}
        self.finite: dict[str, torch.Tensor] = {}
        """A device flag per tensor, read together at the end: one synchronisation instead of thousands."""
        self.tied_copy: tuple[Path, str] | None = None

    def load(self, path: Path, file: Any, name: str) -> None:
        if HARMLESS.search(name):
            return
        if name == HEAD and self.model.lm_head.tied:
            self.tied_copy = (path, name)
            return
        owned = self.owned.get(name)
        if owned is None:
            raise ValueError(f"{path}: tensor {name} has no place in {self.model.spec.architecture}")
        for filled in owned.fills:
            if filled in self.filled_by:
                raise ValueError(f"{path}: {name} is there twice (also as {self.filled_by[filled]})")
            self.filled_by[filled] = name
        view = checked_slice(path, file, name, owned.shape)
        flags = []
        for piece in owned.pieces:
            if piece.dest.numel():
                piece.dest.copy_(view[piece.box])
                flags.append(torch.isfinite(piece.dest).all())
        if flags:
            self.finite[name] = torch.stack(flags).all()

    def finish(self, folder: Path) -> None:
        required = {filled for name, owned in self.owned.items() if owned.fills == (name,) for filled in owned.fills}
        missing = sorted(required - self.filled_by.keys())
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise ValueError(f"{folder}: missing from the checkpoint: {', '.join(missing[:3])}{more}")
        good = torch.stack(list(self.finite.values())).tolist()
        for name, finite in zip(self.finite, good, strict=True):
            if not finite:
                raise ValueError(f"{folder}: tensor {name} has NaN or Inf after conversion to the served dtype")
        if self.tied_copy is not None:
            self._compare_tied(*self.tied_copy)

    def _compare_tied(self, path: Path, name: str) -> None:
        """A head beside a tied embedding is accepted when it is the same; which one to believe is not our choice."""
        owned = self.owned[EMBEDDING]
        with open_weights(path) as file:
            view = checked_slice(path, file, name, owned.shape)
            for piece in owned.pieces:
                copy = view[piece.box].to(piece.dest.device, piece.dest.dtype)
                if not torch.equal(copy, piece.dest):
                    raise ValueError(
                        f"{path}: {name} differs from {EMBEDDING}, but config.json has tie_word_embeddings true"
                    )


def checkpoint_files(folder: Path) -> dict[Path, list[str]]:
    """Tensor names by file. Files are complete and name each tensor once."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return _indexed_files(index)
    single = folder / "model.safetensors"
    if single.is_file():
        with open_weights(single) as file:
            return {single: sorted(file.keys())}
    if any(folder.glob("*.safetensors")):
        raise ValueError(f"{folder}: neither model.safetensors nor model.safetensors.index.json is there")
    pickles = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in folder.glob(pattern))
    if pickles:
        raise ValueError(f"{folder}: only pickled weights ({pickles[0]}); convert them to safetensors")
    raise ValueError(f"{folder}: no safetensors weights")


def _indexed_files(index: Path) -> dict[Path, list[str]]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        by_file: dict[str, set[str]] = {}
        for name, file_name in weight_map.items():
            by_file.setdefault(str(file_name), set()).add(name)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index}: no usable weight_map: {error!r}") from error
    files = {}
    for file_name, expected in sorted(by_file.items()):
        path = index.parent / file_name
        if Path(file_name).name != file_name or not path.is_file():
            raise ValueError(f"{index}: {file_name} is not in the folder, it should hold {min(expected)}")
        with open_weights(path) as file:
            found = set(file.keys())
        if expected != found:
            name = min(expected ^ found)
            where = "the index only" if name in expected else "the file only"
            raise ValueError(f"{path} and {index.name} disagree: {name} is in {where}")
        files[path] = sorted(found)
    return files


@contextmanager
def open_weights(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be read as safetensors: {error}") from error


def checked_slice(path: Path, file: Any, name: str, shape: tuple[int, ...]) -> Any:
    """A lazily read view of a tensor whose type and shape have been checked."""
    view = file.get_slice(name)
    if view.get_dtype() not in FLOAT_DTYPES:
        raise ValueError(f"{path}: {name} is {view.get_dtype()}; supported are {', '.join(FLOAT_DTYPES)}")
    if tuple(view.get_shape()) != shape:
        raise ValueError(f"{path}: {name} has shape {list(view.get_shape())}, config.json makes it {list(shape)}")
    return view
