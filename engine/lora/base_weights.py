"""A checkpoint's weights, read one at a time."""

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from loraplex.engine.lora.adapter import SiteShape
from loraplex.engine.models.mixtral import published_name
from loraplex.engine.weights import EMBEDDING, HEAD, checked_slice, checkpoint_files, open_weights


class BaseWeights:
    """Opens the checkpoint in `folder`; a context manager. Raises ValueError for files that cannot be read."""

    def __init__(self, folder: Path) -> None:
        self._file_of = {name: path for path, names in checkpoint_files(folder).items() for name in names}
        self._folder = folder
        self._stack = ExitStack()
        self._open: dict[Path, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def matrix(self, site: SiteShape, expert: int = 0) -> torch.Tensor:
        """W [out, in] in fp32 of a dense site, of the embedding (transposed), or of one expert.

        Experts are stored one by one, or fused as transformers 5 holds them: [E, 2I, H] (gate rows first), [E, H, I];
        those of gpt-oss [E, H, 2I] (gate and up columns in turn), [E, I, H].
        """
        shape = (site.out_features, site.in_features)
        if site.kind == "embedding":
            return self.slice(EMBEDDING, shape[::-1])[:].float().T
        if site.kind == "dense":
            name = self._as_stored(f"{site.path}.weight")
            if name == HEAD and name not in self._file_of:
                name = EMBEDDING  # tied
            return self.slice(name, shape)[:].float()
        parent, _, projection = site.path.rpartition(".")
        name = self._as_stored(f"{parent}.{expert}.{projection}.weight")
        if name in self._file_of:
            return self.slice(name, shape)[:].float()
        is_down = projection == "down_proj"
        parameter, rows = ("down_proj", shape[0]) if is_down else ("gate_up_proj", 2 * shape[0])
        stored = (shape[1], rows) if site.is_transposed else (rows, shape[1])
        fused = self.slice(f"{parent}.{parameter}", (site.num_experts, *stored))[expert].float()
        if site.is_transposed:
            fused = fused.T
        if is_down:
            return fused
        is_up = projection == "up_proj"
        return fused[int(is_up) :: 2] if site.is_interleaved else fused.chunk(2)[is_up]

    def is_quantised(self, site: SiteShape) -> bool:
        """Whether the experts' weights are there in MXFP4 only, which is not read."""
        return f"{site.path.rpartition('.')[0]}.down_proj_blocks" in self

    def _as_stored(self, name: str) -> str:
        published = published_name(name)
        return published if published in self else name

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def slice(self, name: str, shape: tuple[int, ...]) -> Any:
        """A lazily read view of a tensor that must have this shape."""
        path = self._file_of.get(name)
        if path is None:
            raise ValueError(f"{self._folder}: missing from the checkpoint: {name}")
        if path not in self._open:
            self._open[path] = self._stack.enter_context(open_weights(path))
        return checked_slice(path, self._open[path], name, shape)
