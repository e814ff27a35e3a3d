"""The sites of a checkpoint, from its config.json alone."""

from collections.abc import Mapping
from pathlib import Path

import torch

from loraplex.engine.model_config import read_model_spec
from loraplex.engine.models import build_model
from loraplex.engine.models.sites import Site, lora_sites
from loraplex.engine.parallel import Parallel


def read_sites(folder: Path) -> tuple[Mapping[str, Site], torch.dtype]:
    """Sites by path, and the checkpoint's dtype. Raises ValueError naming config.json and the field."""
    spec = read_model_spec(folder)
    model = build_model(spec, Parallel(), spec.dtype, torch.device("meta"))
    return lora_sites(model), spec.dtype
