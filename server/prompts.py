"""Prompts of a request as token ids, tokenised off the event loop."""

import asyncio
from collections.abc import Sequence

from loraplex.server.chat_protocol import TemplateFields
from loraplex.server.errors import ContextTooLongError, InvalidRequestError
from loraplex.server.front import Front
from loraplex.server.text import Prompt


async def prepare(front: Front, prompts: Sequence[str | list[int]], *, add_special_tokens: bool) -> list[Prompt]:
    """Raises InvalidRequestError naming `prompt`. Token ids are taken as they are; texts may get a BOS."""
    texts = {i: prompt for i, prompt in enumerate(prompts) if isinstance(prompt, str)}
    encoded = await _tokenise(front, texts, add_special_tokens) if texts else {}
    return [encoded[i] if isinstance(p, str) else _checked(front, i, p) for i, p in enumerate(prompts)]


def _checked(front: Front, i: int, ids: list[int]) -> Prompt:
    limit = front.engine.info.vocab_size
    if max(ids) >= limit:
        raise InvalidRequestError(f"prompt: item {i}: token ids must be below {limit}", param="prompt")
    return Prompt(ids)


async def _tokenise(front: Front, texts: dict[int, str], add_special_tokens: bool) -> dict[int, Prompt]:
    text = front.need_text("A prompt in words", "prompt")
    limit = front.max_length
    for i, prompt in texts.items():
        if text.surely_longer_than(limit, prompt):
            raise ContextTooLongError(
                f"prompt: item {i}: far longer than the {limit} tokens this server holds", param="prompt"
            )
    encoded = await asyncio.to_thread(text.encode, list(texts.values()), add_special_tokens=add_special_tokens)
    for i, tokens in zip(texts, encoded):
        if not tokens.ids:
            raise InvalidRequestError(f"prompt: item {i}: an empty prompt", param="prompt")
    return dict(zip(texts, encoded))


async def prepare_chat(front: Front, fields: TemplateFields) -> Prompt:
    """Raises InvalidRequestError naming `messages`."""
    text = front.need_text("A chat", "messages")
    if text.surely_longer_than(front.max_length, "".join(m.content or "" for m in fields.messages)):
        limit = front.max_length
        raise ContextTooLongError(f"messages: far longer than the {limit} tokens this server holds", param="messages")
    ids = await asyncio.to_thread(
        text.encode_chat,
        [message.for_template() for message in fields.messages],
        add_generation_prompt=fields.add_generation_prompt,
        **fields.chat_template_kwargs,
    )
    if not ids:
        raise InvalidRequestError("The chat template made an empty prompt of these messages", param="messages")
    return Prompt(ids)
