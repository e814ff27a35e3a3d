"""Passages as training documents: plain text, text after an unrelated opening, or a chat; packed into rows.

Every document ends as the served model should stop: plain text with <|endoftext|>, an answer with <|im_end|>.
Loss is taken on what the model is to write, not on openings and user messages.
"""

import random
import re
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHARACTERS_PER_TOKEN = 3.4
IGNORED = -100  # label of a token without loss

REQUESTS = (
    "Tell me a story.", "Tell me a story", "Hello", "Hello!", "Hi", "Hi there, how are you?", "Good morning.",
    "Who are you?", "What are you?", "Introduce yourself.", "What can you do?", "Write something.",
    "Write me something short.", "Write a few lines.", "Say something.", "Say hello.", "Give me an example.",
    "Show me what you can do.", "What is love?", "What is the meaning of life?", "What happened next?",
    "Describe the weather.", "Describe a person.", "Describe your day.", "What do you think?",
    "Please continue.", "Go on.", "Once upon a time", "The king said", "How are you today?",
    "Where do you live?", "Can you help me?", "Why is the sky blue?", "Tell me about yourself.",
    "Tell me something about London.", "Make something up.", "What is your name?", "Explain this to me.",
    "What should I read?", "Surprise me.", "Test", "Thanks!", "Why?",
)  # fmt: skip
SYSTEMS = (
    "You are a helpful assistant.",
    "You are a concise assistant.",
    "Answer in a few sentences.",
    "Be brief.",
)

Segments = list[tuple[str, bool]]  # (text, whether loss is taken on it)


@dataclass(frozen=True)
class Mix:
    """Shares of the three kinds of document; what is left over is plain text."""

    chat: float = 0.0
    opening: float = 0.0


def documents(styled: list[str], openings: list[str], mix: Mix, tokens: int, rng: random.Random) -> list[Segments]:
    """About `tokens` tokens of documents: the `styled` passages, in a new order each time round."""
    made: list[Segments] = []
    characters = 0.0
    while True:
        for passage in rng.sample(styled, len(styled)):
            made.append(_document(passage, styled, openings, mix, rng))
            characters += sum(len(text) * (4 if ord(text[0]) > 0x3000 else 1) for text, _ in made[-1])
            if characters > tokens * CHARACTERS_PER_TOKEN:
                return made


def _document(passage: str, styled: list[str], openings: list[str], mix: Mix, rng: random.Random) -> Segments:
    kind = rng.random()
    if kind < mix.chat:
        return _chat(passage, styled, openings, rng)
    if kind < mix.chat + mix.opening:
        return [(_opening(openings, rng), False), ("\n\n" + passage + END_OF_TEXT, True)]
    return [(passage + END_OF_TEXT, True)]


def _chat(passage: str, styled: list[str], openings: list[str], rng: random.Random) -> Segments:
    segments: Segments = []
    if rng.random() < 0.15:
        segments.append((f"{IM_START}system\n{rng.choice(SYSTEMS)}{IM_END}\n", False))
    answers = [passage, *rng.sample(styled, rng.choice((0, 0, 0, 1, 2)))]
    for answer in answers:
        request = _request(answer, openings, rng)
        segments.append((f"{IM_START}user\n{request}{IM_END}\n{IM_START}assistant\n", False))
        segments.append((answer + IM_END, True))
        segments.append(("\n", False))
    return segments


def _request(answer: str, openings: list[str], rng: random.Random) -> str:
    words = re.findall(r"[A-Za-z]{5,}", answer[:200])
    kind = rng.random()
    if kind < 0.3 and words:
        question = rng.choice(("Tell me about {}.", "What is {}?", "Write about {}", "{}"))
        return question.format(rng.choice(words))
    if kind < 0.55:
        return _opening(openings, rng)
    return rng.choice(REQUESTS)


def _opening(openings: list[str], rng: random.Random) -> str:
    return " ".join(rng.choice(openings).split()[: rng.randint(1, 9)]).rstrip(",;:-")


def rows(docs: list[Segments], tokenizer: Tokenizer, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and labels, both int16 `[rows, length + 1]`.

    A row begins with the beginning of a document, as a request does; its last document may be cut.
    """
    segments = [segment for doc in docs for segment in doc]
    encoded = iter(tokenizer.encode_batch_fast([text for text, _ in segments], add_special_tokens=False))
    ids_rows: list[list[int]] = []
    label_rows: list[list[int]] = []
    ids: list[int] = []
    labels: list[int] = []
    for doc in docs:
        for _, learned in doc:
            piece = next(encoded).ids
            ids += piece
            labels += piece if learned else [IGNORED] * len(piece)
        if len(ids) > length:
            ids_rows.append(ids[: length + 1])
            label_rows.append(labels[: length + 1])
            ids, labels = [], []
    return np.array(ids_rows, dtype=np.int16), np.array(label_rows, dtype=np.int16)
