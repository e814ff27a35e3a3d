"""Prompts of a request as token ids, tokenised off the event loop."""

import asyncio

from loraplex.server.chat_protocol import TemplateFields
from loraplex.server.errors import ContextTooLongError, InvalidRequestError
from loraplex.server.front import Front
from loraplex.server.protocol import Prompts
from loraplex.server.text import Prompt


async def prepare(front: Front, prompts: Prompts, *, add_special_tokens: bool) -> list[Prompt]:
    """Raises InvalidRequestError naming `prompt`. Token ids are taken as they are; texts may get a BOS."""
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if texts:
        return await _tokenise(front, texts, add_special_tokens)
    id_lists = [prompt for prompt in prompts if isinstance(prompt, list)]
    for i, ids in enumerate(id_lists):
        if max(ids) >= front.engine.info.vocab_size:
            limit = front.engine.info.vocab_size
            raise InvalidRequestError(f"prompt: item {i}: token ids must be below {limit}", param="prompt")
    return [Prompt(ids) for ids in id_lists]


async def _tokenise(front: Front, texts: list[str], add_special_tokens: bool) -> list[Prompt]:
    text = front.need_text("A prompt in words", "prompt")
    limit = front.max_length
    for i, prompt in enumerate(texts):
        if text.surely_longer_than(limit, prompt):
            raise ContextTooLongError(
                f"prompt: item {i}: far longer than the {limit} tokens this server holds", param="prompt"
            )
    prompts = await asyncio.to_thread(text.encode, texts, add_special_tokens=add_special_tokens)
    for i, tokens in enumerate(prompts):
        if not tokens.ids:
            raise InvalidRequestError(f"prompt: item {i}: an empty prompt", param="prompt")
    return prompts


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
