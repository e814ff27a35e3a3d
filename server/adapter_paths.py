"""Where adapters may be loaded from at run time: only from below the --adapter-root folders."""

import os
from collections.abc import Sequence
from pathlib import Path

from loraplex.server.errors import ForbiddenError, NotFoundError, clip

_FILES = ("adapter_config.json", "adapter_model.safetensors")


def resolve(path: str, roots: Sequence[str]) -> str:
    """The real path of an adapter folder. A relative `path` is looked up below each root in turn, then in the working
    directory, where only what is below a root counts; symlinks are followed as long as their target is below a root,
    those of the files in the folder too.

    Raises ForbiddenError when no root is configured or the target is outside all of them, NotFoundError when
    no such folder is. Outside the roots the answer does not tell what exists.
    """
    if not roots:
        raise ForbiddenError(
            "Loading adapters at run time is off: start the server with --adapter-root DIR", param="lora_path"
        )
    real_roots = [Path(os.path.realpath(root)) for root in roots]
    targets = [Path(os.path.realpath(root / path)) for root in real_roots]
    inside = [target for target in targets if _is_inside(target, real_roots)]
    here = Path(os.path.realpath(path))
    for target in [*inside, here] if _is_inside(here, real_roots) else inside:
        if os.path.isdir(target):
            _check_files(target, real_roots)
            return str(target)
    if len(inside) < len(targets):
        raise ForbiddenError(f"{clip(path)} is not below a folder of --adapter-root", param="lora_path")
    raise NotFoundError(f"No adapter folder {clip(path)} below --adapter-root", param="lora_path")


def _is_inside(target: Path, real_roots: Sequence[Path]) -> bool:
    return any(root in target.parents for root in real_roots)


def _check_files(folder: Path, real_roots: Sequence[Path]) -> None:
    for name in _FILES:
        if not _is_inside(Path(os.path.realpath(folder / name)), real_roots):
            raise ForbiddenError(f"{name} is a link to outside the folders of --adapter-root", param="lora_path")
