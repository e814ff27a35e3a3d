"""The text side of a model: its tokenizer and its sampling defaults, with errors for whoever starts it."""

from loraplex.engine.config import ModelConfig
from loraplex.server.model_files import StartError
from loraplex.server.sampling import GenerationDefaults
from loraplex.server.text import TextProcessor


def read_defaults(model: ModelConfig) -> GenerationDefaults:
    """Raises StartError naming the file."""
    try:
        return GenerationDefaults.of_model(model)
    except ValueError as error:
        raise StartError(str(error)) from error


def read_text(model: ModelConfig, vocab_size: int) -> TextProcessor | None:
    """None with --skip-tokenizer-init. Raises StartError naming the folder."""
    if model.skip_tokenizer_init:
        return None
    try:
        return TextProcessor(model.tokenizer_dir, model.chat_template, vocab_size)
    except (ValueError, OSError) as error:
        words = " ".join(str(error).split())
        raise StartError(f"tokenizer of {model.tokenizer_dir}: {words}") from error
