"""The shapes in which prompts, messages, parameters and adapters may be given, as one list of each."""

from collections.abc import Mapping, Sequence
from typing import Any

PromptInput = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or `{"prompt": text}`, `{"prompt_token_ids": ids}`."""

Message = Mapping[str, Any]


def prompt_list(prompts: PromptInput | Sequence[PromptInput]) -> list[str | list[int]]:
    """Raises ValueError naming the prompt."""
    several: Any = [prompts] if isinstance(prompts, str | Mapping) or _is_ids(prompts) else prompts
    if not isinstance(several, Sequence) or isinstance(several, bytes | bytearray) or not several:
        raise ValueError("prompts must be a text, a list of token ids, or a list of such prompts, and not empty")
    return [_prompt(i, prompt) for i, prompt in enumerate(several)]


def _prompt(i: int, prompt: Any) -> str | list[int]:
    takes_text = takes_ids = True
    if isinstance(prompt, Mapping):
        if len(prompt) != 1 or not prompt.keys() <= {"prompt", "prompt_token_ids"}:
            raise ValueError(f"prompt {i}: expected the key 'prompt' or 'prompt_token_ids', not {list(prompt)}")
        takes_text = "prompt" in prompt
        takes_ids = not takes_text
        [prompt] = prompt.values()
    if isinstance(prompt, str) and takes_text:
        check_text(f"prompt {i}", prompt)
        return prompt
    if takes_text and not takes_ids:
        raise ValueError(f"prompt {i}: 'prompt' must be text; token ids are 'prompt_token_ids'")
    if not _is_ids(prompt):
        raise ValueError(f"prompt {i}: expected text or a list of token ids, which are integers from 0 up")
    return list(prompt)


def check_text(what: str, text: str) -> None:
    """Raises ValueError for text that is none in any encoding, as the HTTP API refuses it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{what}: half of a surrogate pair at character {error.start}") from None


def _is_ids(value: Any) -> bool:
    is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray) and len(value) > 0
    return is_list and all(type(item) is int and item >= 0 for item in value)


def conversation_list(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[list[Message]]:
    """Raises ValueError when it is neither one conversation nor a list of them."""
    if isinstance(messages, Sequence) and messages:
        if all(isinstance(item, Mapping) for item in messages):
            return [[item for item in messages if isinstance(item, Mapping)]]
        if all(isinstance(item, Sequence) and not isinstance(item, str) for item in messages):
            return [list(item) for item in messages if isinstance(item, Sequence)]
    raise ValueError("messages must be a list of messages {'role', 'content'}, or a list of such lists")


def one_each(what: str, value: Any, count: int) -> list[Any]:
    """`value` for each of `count` prompts, or its items when it is a list. Raises ValueError for a wrong length."""
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise ValueError(f"{what}: {len(value)} items for {count} prompts")
    return list(value)
