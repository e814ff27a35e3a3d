"""What can be seen wrong with the folders a server is given before any engine starts."""

import json
import logging
from pathlib import Path

from loraplex.engine.config import Config

log = logging.getLogger(__name__)


class StartError(Exception):
    """Why serving did not begin; the last line names the file or the flag."""


def check_files(config: Config) -> None:
    """Raises StartError for what needs no engine to be seen wrong."""
    model = Path(config.model.model_path)
    _check_folder("the model folder", model, "; models are not downloaded, give a local folder")
    if not (model / "config.json").is_file():
        raise StartError(f"{model / 'config.json'} does not exist; is {model} a model folder?")
    _check_config(model / "config.json", config.parallel.tp_size)
    if config.model.tokenizer_path is not None:
        _check_folder("--tokenizer-path", Path(config.model.tokenizer_path))
    if config.model.chat_template is not None and not Path(config.model.chat_template).is_file():
        raise StartError(f"--chat-template: {config.model.chat_template} is not a file")
    for root in config.lora.adapter_root:
        _check_folder("--adapter-root", Path(root))
    for name, path in config.lora.adapters:
        if not path.startswith("dummy:"):
            _check_folder(f"--lora-paths {name}", Path(path))


def _check_config(path: Path, tp_size: int) -> None:
    """What every rank would find out after seconds. Whatever else is wrong with the file the engine tells."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    if not isinstance(fields, dict):
        return
    if "auto_map" in fields:
        log.warning("%s: auto_map is ignored: code that comes with a checkpoint is never run", path)
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = fields.get(name)
        if isinstance(heads, int) and heads > 0 and heads % tp_size and tp_size % heads:
            raise StartError(f"--tp-size {tp_size} cannot split {name} {heads} of {path} evenly")


def _check_folder(what: str, path: Path, advice: str = "") -> None:
    if not path.is_dir():
        raise StartError(f"{what}: {path} {'is not a folder' if path.exists() else f'does not exist{advice}'}")
