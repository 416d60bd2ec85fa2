# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Encodes long texts in pieces, with the ids of the whole, in bounded memory.

`tokenizers` needs about 100 bytes of memory for each byte of a text. A text is therefore cut into
pieces of about 64,000 characters, where a space or a line end follows another character:

    byte_level   the regular expression of GPT-2: such a place always ends a token (`cutting.py`)
    prepended    SentencePiece BPE without a pre-tokenizer (Llama 2, Mixtral): no token contains a
                 space after another character, so that no merge crosses the place. The normalizer
                 puts a space before every piece, and the piece begins after its own
    verified     any other: each piece is encoded with the 64 characters after it. A cut is kept if
                 a word of the pre-tokenizer ends there, and the characters after it have the same
                 ids alone; otherwise two pieces are joined and encoded again

`verified` is exact where a word, and the ids in it, depend on at most 64 characters after it, which
holds for the tokenizers of Llama 3, Qwen, OLMoE, DeepSeek and GPT-4. After 8 cuts in a row that do
not hold, the rest is encoded whole. Texts shorter than a piece are never cut.

A text that is too long for memory comes in parts (`encode_parts`), and is cut at the same places.
Where a text has no such place (a line of gigabytes without a space), or no cut holds, a piece grows
to the end of the text, and so does the memory that it needs.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import numpy as np

from jaxmoe.data.tokenizer.cutting import BEFORE_SPACES, USUAL, cuts_at_spaces, pieces
from jaxmoe.messages import Progress

Kind = Literal["byte_level", "prepended", "verified"]
Encode = Callable[[Sequence[str]], list[Any]]
"""Returns the encodings of texts, with offsets."""

_AT_ONCE = 8
_AHEAD = 64
_MOST_JOINED = 8
"""Cuts that do not hold, one after another, before the rest is encoded whole."""
_SPACE = "\u2581"


def kind_of(data: dict[str, Any]) -> Kind:
    """Return how the texts of a tokenizer may be cut.

    Args:
        data: Content of its tokenizer.json.
    """
    if cuts_at_spaces(data):
        return "byte_level"
    return "prepended" if _is_prepended(data) else "verified"


def _is_prepended(data: dict[str, Any]) -> bool:
    """Return whether no token crosses a space, and every text begins with one."""
    normalizer = data.get("normalizer") or {}
    model = data["model"]
    steps = normalizer.get("normalizers") or [normalizer]
    expected = [
        {"type": "Prepend", "prepend": _SPACE},
        {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE},
    ]
    added = data.get("added_tokens") or []
    return (
        steps == expected
        and data.get("pre_tokenizer") is None
        and model.get("type") == "BPE"
        and not model.get("dropout")
        and all(token.get("special") for token in added)
        and not any(re.search(f"[^{_SPACE}]{_SPACE}", token) for token in model["vocab"])
    )


def encode_pieces(
    kind: Kind, texts: Sequence[str], encode: Encode, ids_of: Callable[[Sequence[str]], list[Any]]
) -> list[np.ndarray]:
    """Return the ids of each text.

    Args:
        kind: How the texts may be cut.
        texts: Texts of any length.
        encode: Encoder with offsets and words.
        ids_of: Faster encoder, to int32 arrays of ids.
    """
    progress = _EncodedWindow()
    if kind == "verified":
        short_texts = [text for text in texts if _is_short(text)]
        short = iter(ids_of(short_texts))
        return [
            next(short) if _is_short(text) else _join(_verify([text], encode, progress))
            for text in texts
        ]
    cut = pieces if kind == "byte_level" else _after_spaces
    encoded = [bytearray() for _ in texts]
    numbered = ((number, part) for number, text in enumerate(texts) for part in cut([text]))
    while group := list(itertools.islice(numbered, _AT_ONCE)):
        for (number, part), ids in zip(group, ids_of([p for _, p in group]), strict=True):
            encoded[number] += ids.data
            progress.add(len(part))
    return [np.frombuffer(ids, np.int32) for ids in encoded]


def encode_parts(
    kind: Kind, parts: Iterable[str], encode: Encode, ids_of: Callable[[Sequence[str]], list[Any]]
) -> Iterator[np.ndarray]:
    """Yield the ids of one text, in order: together those of `encode_pieces`.

    A few pieces of the text are in memory, except where no cut holds.

    Args:
        kind: How the text may be cut.
        parts: Text, in parts of any size.
        encode: Encoder with offsets and words.
        ids_of: Faster encoder, to int32 arrays of ids.
    """
    progress = _EncodedWindow()
    if kind == "verified":
        yield from _verify(parts, encode, progress)
        return
    text_pieces = pieces(parts) if kind == "byte_level" else _after_spaces(parts)
    while group := list(itertools.islice(text_pieces, _AT_ONCE)):
        yield from ids_of(group)
        progress.add(sum(map(len, group)))


class _EncodedWindow:
    """Reports the characters that are encoded, where that takes long."""

    def __init__(self):
        self._progress = Progress()
        self._characters = 0

    def add(self, characters: int) -> None:
        """Count further characters."""
        self._characters += characters
        self._progress.at("tokenizing: {:.1f} million characters", self._characters / 1e6)


def _join(parts: Iterable[np.ndarray]) -> np.ndarray:
    """Return the concatenation, without a second copy of all parts."""
    ids = bytearray()
    for part in parts:
        ids += part.data
    return np.frombuffer(ids, np.int32)


def _is_short(text: str) -> bool:
    """Return whether a text is one piece."""
    text_pieces = pieces([text])
    next(text_pieces)
    return next(text_pieces, None) is None


def _after_spaces(parts: Iterable[str]) -> Iterator[str]:
    """Yield pieces that are cut before spaces, each without the space at its begin."""
    for index, part in enumerate(pieces(parts, BEFORE_SPACES)):
        yield part[1:] if index else part


def _verify(parts: Iterable[str], encode: Encode, progress: _EncodedWindow) -> Iterator[np.ndarray]:
    """Yield the ids of the pieces of a text, joined where a cut does not hold."""
    joined: list[str] = []
    text_pieces = _with_next(pieces(parts, USUAL))
    while group := list(itertools.islice(text_pieces, _AT_ONCE)):
        windows = encode([piece + ahead for piece, ahead in group])
        starts = encode([ahead for _, ahead in group])
        for number, ((piece, ahead), window, start) in enumerate(
            zip(group, windows, starts, strict=True), start=1
        ):
            joined.append(piece)
            if len(joined) > 1:  # the cut before the piece did not hold
                (window,) = encode(["".join(joined) + ahead])
            size = sum(map(len, joined))
            count = _held(window, size, start, is_last=not ahead)
            if count is not None:
                yield np.array(window.ids[:count], np.int32)
                progress.add(size)
                joined = []
            elif len(joined) == _MOST_JOINED:
                rest = (piece for piece, _ in itertools.chain(group[number:], text_pieces))
                (window,) = encode(["".join([*joined, *rest])])
                yield np.array(window.ids, np.int32)
                return


def _with_next(text_pieces: Iterator[str]) -> Iterator[tuple[str, str]]:
    """Yield each piece, and the characters after it that are encoded with it."""
    waiting: list[str] = []
    for piece in itertools.chain(text_pieces, [None]):
        if piece is not None:
            waiting.append(piece)
        while waiting and (piece is None or sum(map(len, waiting[1:])) >= _AHEAD):
            first = waiting.pop(0)
            yield first, "".join(waiting)[:_AHEAD]


def _held(window: Any, size: int, start: Any, *, is_last: bool) -> int | None:
    """Return the number of ids before a cut; None if the cut does not hold.

    Args:
        window: Encoding of a piece and the characters after it.
        size: Characters of the piece.
        start: Encoding of the characters after it alone.
        is_last: Whether there are none.
    """
    ids = window.ids
    offsets = window.offsets
    word_ids = window.word_ids
    if is_last:
        return len(ids)
    count = len(ids) - len(start.ids)
    if not 0 < count < len(ids) or ids[count:] != start.ids:
        return None
    is_border = offsets[count - 1][1] <= size <= offsets[count][0]
    return count if is_border and word_ids[count - 1] != word_ids[count] else None
