"""Where adapters may be loaded from at run time: only from below the --adapter-root folders."""

import os
from collections.abc import Sequence
from pathlib import Path

from loraplex.server.errors import ForbiddenError, NotFoundError, clip


def resolve(path: str, roots: Sequence[str]) -> str:
    """The real path of an adapter folder. A relative `path` is looked up below each root in turn; symlinks
    are followed as long as their target is below a root.

    Raises ForbiddenError when no root is configured or the target is outside all of them, NotFoundError when
    no such folder is. Outside the roots the answer does not tell what exists.
    """
    if not roots:
        raise ForbiddenError(
            "Loading adapters at run time is off: start the server with --adapter-root DIR", param="lora_path"
        )
    real_roots = [Path(os.path.realpath(root)) for root in roots]
    targets = [Path(os.path.realpath(root / path)) for root in real_roots]
    inside = [target for target in targets if any(root in target.parents for root in real_roots)]
    if not inside:
        raise ForbiddenError(f"{clip(path)} is not below a folder of --adapter-root", param="lora_path")
    for target in inside:
        if target.is_dir():
            return str(target)
    raise NotFoundError(f"No adapter folder {clip(path)} below --adapter-root", param="lora_path")
