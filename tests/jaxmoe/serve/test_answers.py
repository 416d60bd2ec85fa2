# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Text of answers: what tokens add to the prompt, in parts that only grow."""

import numpy as np
import pytest

from jaxmoe.data import TextOnlyConfig
from jaxmoe.data.tokenizer import FileConfig
from jaxmoe.generation.text_stream import TextStream
from tests.support.endpoint import Text
from tests.support.sentencepiece_tokenizers import write_sentencepiece


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """Source of an imported model whose tokenizer marks spaces, and adds <s>."""
    place = write_sentencepiece(tmp_path_factory.mktemp("sentencepiece"))
    return TextOnlyConfig(tokenizer=FileConfig(path=str(place))).build()


def _answer(codec, prompt, tokens, stop=()):
    stream = TextStream(codec, stop, [int(token) for token in prompt])
    return [*(stream.add(int(token)) for token in tokens), stream.finish()]


@pytest.mark.parametrize("rest", [" world", " a small \u00e9\U0001f600 text", "s and dogs", " "])
def test_an_answer_goes_on_where_the_prompt_ends(words, rest):
    """The first space of a continuation is text, and so are those behind it."""
    prompt, whole = words.encode("hello"), words.encode(f"hello{rest}")
    assert (whole[: len(prompt)] == prompt).all()
    parts = _answer(words, prompt, whole[len(prompt) :])
    assert "".join(parts) == rest
    spelled = b"".join(words.token_bytes(int(token)) for token in whole[len(prompt) :])
    assert spelled.decode() == rest


def test_an_answer_at_the_begin_of_a_text_has_no_space_before_it(words):
    begin, *rest = words.encode("hello world").tolist()
    assert "".join(_answer(words, [begin], rest)) == "hello world"
    first = words.token_bytes(rest[0], is_first=True)
    assert first + b"".join(map(words.token_bytes, rest[1:])) == b"hello world"


def test_a_stop_string_may_begin_with_the_first_space(words):
    prompt, whole = words.encode("hello"), words.encode("hello world")
    assert _answer(words, prompt, whole[len(prompt) :], stop=(" world",)) == [""] * (
        len(whole) - len(prompt) + 1
    )


def test_a_prompt_that_ends_within_a_character_is_completed():
    content = "a\U0001f600b".encode()
    for cut in range(1, len(content)):
        rest = content.decode()[len(content[:cut].decode(errors="ignore")) :]
        assert "".join(_answer(Text(), content[:cut], content[cut:])) == rest


def test_bytes_of_tokens_that_are_no_text(words):
    assert words.token_bytes(words.tokenizer.separator) == b""
    assert words.token_bytes(words.vocab_size + 5) == b""
    high = words.tokenizer.encode_controls("\u00e9")[-2:]
    assert [words.token_bytes(int(token)) for token in high] == [b"\xc3", b"\xa9"]
    assert np.all(high > 2)
