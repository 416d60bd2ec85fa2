# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Text that grows: the same as the whole text for every cut, at a flat cost per token."""

import functools

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from jaxmoe.data import TextOnlyConfig
from jaxmoe.data.tokenizer import FileConfig
from jaxmoe.generation.text_stream import Detokenizer, StopMatcher, TextStream
from jaxmoe.serve.http.marks import MarkedCodec
from tests.support.lines import lines_of
from tests.support.sentencepiece_tokenizers import write_sentencepiece
from tests.support.texts import CountedBytes, Letters

EOS = 256


def write_pairs(place):
    """Write a tokenizer of byte pairs, some of which are parts of two characters."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=alphabet,
        special_tokens=["<|endoftext|>"],
        show_progress=False,
    )
    made.train_from_iterator(["\u4e2d\u20ac\u4e2d\u4e2d\u20ac\u20acab"] * 9, trainer)
    place.mkdir()
    made.save(str(place / "tokenizer.json"))
    return place


@pytest.fixture(scope="module")
def codecs(tmp_path_factory):
    """Codecs by name: bytes, byte pairs, and words with marked spaces."""
    place = tmp_path_factory.mktemp("tokenizers")
    pairs, words = write_pairs(place / "pairs"), write_sentencepiece(place / "words")
    return {
        "bytes": CountedBytes(),
        "pairs": TextOnlyConfig(tokenizer=FileConfig(path=str(pairs))).build(),
        "words": TextOnlyConfig(tokenizer=FileConfig(path=str(words))).build(),
        "marked": MarkedCodec(CountedBytes(), {EOS + 1: "<mark>"}),
    }


def stream_of(codec, prompt, tokens, **options):
    """Return the parts of an answer."""
    stream = TextStream(codec, prompt=prompt, **options)
    return [*(stream.add(token) for token in tokens), stream.finish()]


@settings(max_examples=150, deadline=None)
@given(
    text=st.text(
        st.sampled_from("ab \u00e9\u20ac\U0001f600\u4e2d\n")
        | st.characters(codec="utf-8", exclude_characters="\u2581\ufffd"),
        max_size=60,
    ),
    name=st.sampled_from(["bytes", "pairs", "words", "marked"]),
    data=st.data(),
)
def test_parts_are_the_whole_text_for_every_cut(codecs, text, name, data):
    """A prompt may end within a character, and marks may stand between tokens."""
    codec = codecs[name]
    ids = [int(token) for token in np.asarray(codec.encode("h" + text))]
    cut = data.draw(st.integers(1, len(ids)))
    # Where bytes stand for words, all bytes side by side are replaced until the last is whole.
    while name == "words" and codec.decode(np.asarray(ids[:cut], np.int32)).endswith("\ufffd"):
        cut += 1
    before = codec.decode(np.asarray(ids[:cut], np.int32)).rstrip("\ufffd")
    whole = codec.decode(np.asarray(ids, np.int32))
    tokens = ids[cut:]
    if name in ("bytes", "marked"):
        for place in sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=3)))[::-1]:
            tokens[place:place] = [EOS] * 20
    parts = stream_of(codec, ids[:cut], tokens)
    assert whole.startswith(before) and "".join(parts) == whole[len(before) :]
    assert all("\ufffd" not in part for part in parts), "no part of a character is shown"


@settings(max_examples=150, deadline=None)
@given(tokens=st.lists(st.integers(0, 255), max_size=80))
def test_bytes_that_are_no_text_are_those_of_the_whole_decoding(tokens):
    assert "".join(stream_of(CountedBytes(), (), tokens)) == CountedBytes().decode(tokens)


def slow_cut(text, stops, cuts, num_free, has_stop):
    """Return the text before the first stop string that ends behind `num_free` characters."""
    for end in cuts:
        ending = [stop for stop in stops if text[:end].endswith(stop) and end > num_free]
        places = {stop: end - len(stop) for stop in ending}
        if places:
            stop = min(places, key=lambda one: (places[one], stops.index(one)))
            return text[: places[stop] + has_stop * len(stop)]
    return text


@settings(max_examples=300, deadline=None)
@given(
    text=st.text("ab", max_size=40),
    stops=st.lists(st.text("ab", min_size=1, max_size=7), max_size=3, unique=True),
    min_tokens=st.integers(0, 5),
    has_stop=st.booleans(),
)
def test_an_answer_is_cut_at_the_stop_string_that_begins_first(text, stops, min_tokens, has_stop):
    """And what is held back is exactly the longest begin of one."""
    stream = TextStream(Letters(), stops, min_tokens=min_tokens, has_stop=has_stop)
    shown = ""
    for number, token in enumerate(Letters().encode(text), 1):
        shown += stream.add(token)
        if not stream.is_stopped:
            searched = text[:number]
            begins = (size for stop in stops for size in range(len(stop)))
            longest = max(
                (s for s in begins if searched.endswith(tuple(x[:s] for x in stops if len(x) > s))),
                default=0,
            )
            assert shown == text[: number - longest]
    shown += stream.finish()
    cuts = range(1, len(text) + 1)
    assert shown == slow_cut(text, stops, cuts, min(min_tokens, len(text)), has_stop)


def test_a_stop_string_is_looked_for_across_parts():
    matcher = StopMatcher(("aab", "b!"))
    assert matcher.add("xaa") is None and matcher.num_open == 2
    assert matcher.add("a") is None and matcher.num_open == 2
    assert matcher.add("b") == (2, 5)
    matcher.skip("xaabaa")
    assert matcher.num_open == 2 and matcher.add("b") == (9, 12)
    assert StopMatcher(()).add("a") is None and StopMatcher(()).num_open == 0


ANSWERS = {
    "letters": lambda size: ([97 + index % 7 for index in range(size)], ()),
    "bytes that are no text": lambda size: ([0x80] * size, ()),
    "marks": lambda size: ([EOS] * size, ()),
    "a stop string that nearly comes": lambda size: ([97] * size, ("a" * size + "b",)),
    "a stop string that fails again and again": lambda size: (
        ([97] * 99 + [98]) * (size // 100),
        ("a" * 99 + "c",) * 3,
    ),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_the_cost_of_a_token_does_not_grow_with_the_answer(name):
    """Counted in lines that run and tokens that are decoded."""
    costs = []
    for size in (500, 4000):
        tokens, stops = ANSWERS[name](size)
        codec = CountedBytes()
        lines = lines_of(
            lambda codec=codec, tokens=tokens, stops=stops: stream_of(
                codec, (97,), tokens, stop=stops
            )
        )
        costs.append((lines / size, codec.num_tokens / size, codec.num_calls / size))
    for short, long in zip(*costs, strict=True):
        assert long <= 1.05 * short
    assert costs[1][1] <= 20 and costs[1][2] <= 2


def test_long_stop_strings_cost_what_short_ones_do():
    tokens = [97 + index % 5 for index in range(300)]
    costs = []
    for size in (10, 60_000):
        stops = ["abc" + "x" * size, "e" * size]
        costs.append(lines_of(functools.partial(stream_of, CountedBytes(), (), tokens, stop=stops)))
    assert costs[1] <= 1.05 * costs[0]


def test_a_single_character_never_costs_the_whole_stop_string():
    """A mismatch behind a long match skips the beginnings that fail at the same character."""
    size = 5000
    matcher = StopMatcher(("a" * size + "b",))
    matcher.add("a" * size)
    assert lines_of(lambda: matcher.add("c")) < 40
    assert matcher.num_open == 0


def test_detokenizing_needs_no_prompt():
    detokenizer = Detokenizer(CountedBytes())
    assert [detokenizer.add(token) for token in "a\u00e9".encode()] == ["a", "", "\u00e9"]
    assert detokenizer.finish() == ""
    detokenizer.add(0xC3)
    assert detokenizer.finish() == "\ufffd"
