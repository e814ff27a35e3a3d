"""What every handler needs: the engine, the text side, the settings and the metrics of one server."""

from dataclasses import dataclass

from loraplex.engine.config import Config
from loraplex.engine.hooks import Hooks
from loraplex.server.engine_api import Engine
from loraplex.server.errors import InvalidRequestError
from loraplex.server.metrics import Metrics
from loraplex.server.sampling import GenerationDefaults
from loraplex.server.text import TextProcessor
from loraplex.server.vocabulary import NoVocabulary, Vocabulary


@dataclass(frozen=True)
class Front:
    engine: Engine
    text: TextProcessor | None
    """None with --skip-tokenizer-init."""
    config: Config
    defaults: GenerationDefaults
    metrics: Metrics
    hooks: Hooks
    created: int
    """Start of the server in Unix seconds, `created` of its models."""

    @property
    def served_names(self) -> tuple[str, ...]:
        return self.config.model.served_model_name or (self.config.model.model_path,)

    @property
    def vocabulary(self) -> Vocabulary:
        return NoVocabulary() if self.text is None else self.text.vocabulary

    @property
    def max_length(self) -> int:
        """Tokens of prompt + completion one request may have."""
        return min(self.engine.info.context_length, self.engine.info.max_total_tokens)

    def need_text(self, what: str, param: str | None = None) -> TextProcessor:
        """Raises InvalidRequestError when the server has no tokenizer."""
        if self.text is None:
            raise InvalidRequestError(
                f"{what} needs a tokenizer, and this server was started with --skip-tokenizer-init",
                param=param,
            )
        return self.text
