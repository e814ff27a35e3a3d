"""Text ↔ token ids: tokenising prompts, rendering chat templates, decoding ids. Blocking: call it off the
event loop.
"""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from loraplex.server.detokenizer import decode
from loraplex.server.errors import InvalidRequestError, clip
from loraplex.server.special_text import SpecialTextGuard
from loraplex.server.vocabulary import TokenizerVocabulary


@dataclass(frozen=True, slots=True)
class Prompt:
    ids: list[int]
    added: frozenset[int] = frozenset()
    """Positions of tokens the tokenizer added itself (BOS), which are no part of the client's text."""
    from_text: bool = False


class TextProcessor:
    def __init__(self, tokenizer_dir: str, chat_template_file: str | None, model_vocab_size: int) -> None:
        """Loads local files only, runs no code of the checkpoint. Raises ValueError or OSError naming the file
        or the field.
        """
        loaded = AutoTokenizer.from_pretrained(tokenizer_dir, local_files_only=True, trust_remote_code=False)
        if not isinstance(getattr(loaded, "backend_tokenizer", None), Tokenizer):
            raise ValueError(f"{tokenizer_dir}: no tokenizer.json (slow tokenizers are not supported)")
        if loaded.backend_tokenizer.get_vocab_size(with_added_tokens=False) <= 1:
            # Without any file transformers makes an empty tokenizer of the model's type, which reads all text as "".
            raise ValueError(f"{tokenizer_dir}: no tokenizer.json; see --tokenizer-path and --skip-tokenizer-init")
        _check_size(loaded.backend_tokenizer, tokenizer_dir, model_vocab_size)
        if chat_template_file is not None:
            loaded.chat_template = Path(chat_template_file).read_text(encoding="utf-8")
        _check_template(loaded, chat_template_file or f"{tokenizer_dir}: chat_template")
        self._templates = loaded
        self._tokenizer: Tokenizer = loaded.backend_tokenizer
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocabulary = TokenizerVocabulary(self._tokenizer)
        self._guard = SpecialTextGuard(self.vocabulary.special_texts)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._templates.chat_template)

    def encode(self, texts: list[str], *, add_special_tokens: bool = True) -> list[Prompt]:
        """One Prompt per text."""
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return [
            Prompt(
                encoding.ids,
                frozenset(i for i, added in enumerate(encoding.special_tokens_mask) if added),
                from_text=True,
            )
            for encoding in encodings
        ]

    def encode_chat(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool, **kwargs: Any) -> list[int]:
        """Token ids of the rendered messages; the template alone decides about BOS.

        Raises InvalidRequestError when there is no template or it refuses the messages.
        """
        if not self.has_chat_template:
            raise InvalidRequestError(
                "No chat template here: start the server with --chat-template or use /v1/completions",
                param="messages",
            )
        rendered = self._render(
            [self._protected(message) for message in messages],
            add_generation_prompt=add_generation_prompt,
            **self._guard.protect(kwargs),
        )
        return [token for text, data in self._guard.split(rendered) for token in self._piece_ids(text, data)]

    def _protected(self, message: dict[str, Any]) -> dict[str, Any]:
        return self._guard.protect(message) | {"role": message["role"]}

    def _render(self, messages: list[dict[str, Any]], **kwargs: Any) -> str:
        """The template runs in transformers' immutable sandbox. It is foreign code: whatever it raises is a
        refusal.
        """
        try:
            return str(self._templates.apply_chat_template(messages, tokenize=False, **kwargs))
        except jinja2.TemplateError as exc:
            raise InvalidRequestError(
                f"The chat template refused the messages: {clip(str(exc))}", param="messages"
            ) from exc
        except Exception as exc:
            raise InvalidRequestError("The chat template failed on these messages", param="messages") from exc

    def _piece_ids(self, text: str, data: bool) -> list[int]:
        tokenizer = self._literal if data else self._tokenizer
        return tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids

    @functools.cached_property
    def _literal(self) -> Tokenizer:
        """A copy that reads special tokens as plain text. Made when first needed: the switch is not per
        call.
        """
        copy = Tokenizer.from_str(self._tokenizer.to_str())
        copy.encode_special_tokens = True
        return copy

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        return decode(self.vocabulary, ids, skip_special_tokens=skip_special_tokens)

    def surely_longer_than(self, limit: int, text: str) -> bool:
        """Whether `text` cannot fit `limit` tokens, without tokenising it. Normalising may shrink text, hence
        the 4.
        """
        return len(text) > 4 * limit * self.vocabulary.max_token_bytes


def _check_size(tokenizer: Tokenizer, folder: str, model_vocab_size: int) -> None:
    """Raises ValueError when a text could become an id that the model has no embedding for."""
    token, last = max(tokenizer.get_vocab().items(), key=lambda item: item[1])
    if last >= model_vocab_size:
        raise ValueError(
            f"{folder}: tokenizer.json: {clip(token)} has id {last}, but vocab_size in the model's config.json is "
            f"{model_vocab_size}: is this the model's tokenizer?"
        )


def _check_template(tokenizer: Any, where: str) -> None:
    """Raises ValueError for a chat template that is not Jinja. It may refuse the trial message."""
    try:
        if tokenizer.chat_template:
            tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"{where}: line {error.lineno}: {error.message}") from error
    except Exception:
        return
