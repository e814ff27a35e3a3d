"""Detokeniser and stop strings: independent of how tokens and text are cut."""

import json
import random

import pytest
from tokenizers import Tokenizer, decoders, models

from loraplex.server.detokenizer import Detokenizer, decode
from loraplex.server.stops import StopChecker
from loraplex.server.text import TextProcessor
from loraplex.server.vocabulary import TokenizerVocabulary


def random_text(rng):
    pools = ["abc ", "äöü ß", "日本語", "🌶👩‍👩‍👧🇩🇪", "\u202e\u0301"]
    return "".join(rng.choice(rng.choice(pools)) for _ in range(rng.randint(0, 40)))


@pytest.mark.parametrize("seed", range(30))
def test_pieces_are_whole_characters_and_join_to_the_text(text_processor, seed):
    wanted = random_text(random.Random(seed))
    detokenizer = Detokenizer(text_processor.vocabulary, skip_special_tokens=True)
    pieces = [detokenizer.push(token) for token in text_processor.encode([wanted])[0].ids]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) == wanted
    assert detokenizer.flush() == ""
    assert detokenizer.length == len(wanted)


@pytest.mark.parametrize("seed", range(30))
def test_random_tokens_equal_the_tokenizers_own_decode(text_processor, tokenizer_dir, seed):
    rng = random.Random(seed)
    ids = [rng.choice([rng.randrange(320), 0xF0, 0x9F, 0x8C, 0xB6, 97]) for _ in range(60)]
    whole = Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json")).decode(ids, skip_special_tokens=True)
    assert decode(text_processor.vocabulary, ids, skip_special_tokens=True) == whole


def test_cut_character_is_one_replacement_at_the_end(text_processor):
    assert decode(text_processor.vocabulary, [97, 0xF0, 0x9F, 0x8C], skip_special_tokens=True) == "a\ufffd"


def test_unknown_and_special_ids(text_processor):
    assert decode(text_processor.vocabulary, [97, 319, 258, 98], skip_special_tokens=True) == "ab"
    assert decode(text_processor.vocabulary, [97, 319, 258, 98], skip_special_tokens=False) == "a<|im_end|>b"


def test_names_of_tokens(text_processor):
    assert [text_processor.vocabulary.name(i) for i in (97, 32, 0xF0, 258, 300)] == [
        "a",
        " ",
        "bytes:\\xf0",
        "<|im_end|>",
        "token_id:300",
    ]


def test_byte_fallback_keeps_spaces_and_joins_bytes():
    vocab = {"<unk>": 0, "▁hello": 1, "▁world": 2, "a": 3} | {f"<0x{b:02X}>": 4 + b for b in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    vocabulary = TokenizerVocabulary(tokenizer)
    ids = [1, 2, *(4 + byte for byte in "é🌶".encode()), 3]
    assert decode(vocabulary, ids, skip_special_tokens=True) == " hello worldé🌶a"


def expected_stop(text, stops):
    """Character by character, the definition of the stop that ends the text."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end - len(stop)], stop
    return text, None


@pytest.mark.parametrize("seed", range(300))
def test_stops_for_random_texts_and_cuts(seed):
    rng = random.Random(seed)
    text = "".join(rng.choice("ab🌶") for _ in range(rng.randint(0, 30)))
    stops = tuple({"".join(rng.choice("ab🌶") for _ in range(rng.randint(1, 6))) for _ in range(rng.randint(1, 4))})
    wanted, found = expected_stop(text, stops)
    checker, shown, rest = StopChecker(stops), "", text
    while rest and checker.found is None:
        size = rng.randint(0, 4)
        shown += checker.push(rest[:size])
        rest = rest[size:]
        assert wanted.startswith(shown), "a part of a stop was shown"
    shown += checker.flush()
    assert (shown, checker.found) == (wanted, found)


def test_include_stop():
    checker = StopChecker(("lo w",), include_stop=True)
    assert checker.push("hel") + checker.push("lo worl") == "hello w"


def test_model_folder_without_a_tokenizer_is_refused(tmp_path):
    """transformers would make one without words, which reads every prompt as an empty one."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe"}))
    with pytest.raises(ValueError, match="tokenizer-path") as caught:
        TextProcessor(str(tmp_path), None, 320)
    assert str(tmp_path) in str(caught.value)


def test_template_that_is_not_jinja_is_refused_at_start(make_text, tokenizer_dir, tmp_path):
    with pytest.raises(ValueError, match=r"chat_template: line 2: "):
        make_text(template="{{ messages }}\n{% for m in %}")
    file = tmp_path / "mine.jinja"
    file.write_text("{% if %}")
    with pytest.raises(ValueError, match=r"mine\.jinja: line 1: "):
        TextProcessor(str(tokenizer_dir), str(file), 320)
    file.write_text("{{ raise_exception('no') }}")  # a refusal of these messages is not a fault of the template
    assert TextProcessor(str(tokenizer_dir), str(file), 320).has_chat_template


def test_tokenizer_with_more_ids_than_the_model_is_refused_at_start(tokenizer_dir):
    TextProcessor(str(tokenizer_dir), None, 259)
    with pytest.raises(ValueError, match=r"tokenizer\.json: '<\|im_end\|>' has id 258, but vocab_size .* is 258"):
        TextProcessor(str(tokenizer_dir), None, 258)
