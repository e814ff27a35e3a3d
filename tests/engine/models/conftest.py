import importlib.util
import sys
from pathlib import Path

import pytest


def _load_harness():
    path = Path(__file__).with_name("harness.py")
    spec = importlib.util.spec_from_file_location("model_harness", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def harness():
    return _load_harness()


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory, harness):
    """(transformers model, folder) of each architecture; read only."""
    made = {}

    def get(architecture):
        if architecture not in made:
            model = harness.hf_model(architecture)
            made[architecture] = model, harness.save(model, tmp_path_factory.mktemp(architecture))
        return made[architecture]

    return get
