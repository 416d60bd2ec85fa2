# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Text that grows token by token, at a cost per token that does not grow with it.

    Detokenizer     decodes the last few tokens with each new one
    StopMatcher     reads each character once, whatever the lengths of the stop strings
    TextStream      both: text is passed on as soon as no further token can change it

What is passed on part by part is what decoding and searching the whole text gives.
"""

from __future__ import annotations

import collections
import os
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from jaxmoe.data.source import token_bytes

_CONTEXT = 8
"""Tokens of a prompt that its continuation is decoded behind: more than a character has."""
_BROKEN = "\ufffd"
"""Replacement of bytes that are not UTF-8, such as the first ones of a character."""
_OPEN = 3
"""Tokens within a character at most; some decoders write a replacement for each byte."""
_KEPT = 8
_WINDOW = 16
"""Tokens that are decoded together, and those of them that stay when the window moves."""


@runtime_checkable
class TextCodec(Protocol):
    """What a `jaxmoe.data.Source` has for text."""

    def encode(self, text: str) -> Any:
        """Return the token ids of a prompt."""
        ...

    def decode(self, tokens: Any) -> str:
        """Return the text of token ids."""
        ...


def context_of(prompt: Sequence[int] | np.ndarray, size: int = _CONTEXT) -> list[int]:
    """Return the last tokens of a prompt, behind which its continuation is decoded.

    Decoders treat the first token of a text apart: those of SentencePiece leave out its space.

    Args:
        prompt: Token ids.
        size: Tokens at most.
    """
    return [int(token) for token in prompt[-size:]]


class Detokenizer:
    """Decodes the tokens of one continuation, and returns text that no further token changes.

    Decoders treat the first token of a text apart, a character may need several tokens, and some
    replace all bytes side by side as long as the last character is not whole, so that a token is
    decoded with those before it. Tokens without text, such as marks, are left out.
    """

    def __init__(self, codec: TextCodec, prompt: Sequence[int] | np.ndarray = ()):
        """Begin behind a prompt.

        Args:
            codec: Decoder.
            prompt: Token ids that the text continues.
        """
        self._codec = codec
        for size in range(_CONTEXT, _CONTEXT + _OPEN + 1):
            self._tokens = context_of(prompt, size)
            self._text = self._decode()
            if not self._text.startswith(_BROKEN):
                break
        self._num_certain = len(self._text.rstrip(_BROKEN))
        self._num_broken = 0
        """Tokens since the last one that made text certain."""
        self._prompt: str | None = self._text

    def add(self, token: int) -> str:
        """Return the new text that is certain.

        Args:
            token: The next token.
        """
        self._tokens.append(token)
        text = self._decode()
        if text == self._text and not token_bytes(self._codec, token):
            self._tokens.pop()
            return ""
        self._text = text
        num_whole = len(text.rstrip(_BROKEN))
        is_whole = num_whole == len(text) or num_whole > self._num_certain
        self._num_broken = 0 if is_whole else self._num_broken + 1
        is_broken = self._num_broken > _OPEN  # whatever follows
        new = self._take(len(text) - _OPEN if is_broken else num_whole)
        if len(self._tokens) > _WINDOW:
            self._move(is_broken=is_broken)
        return new

    def finish(self) -> str:
        """Return the text that was not certain, when no token follows."""
        return self._take(len(self._text))

    def _take(self, end: int) -> str:
        """Return the text from what was returned to a place."""
        start = self._num_certain
        if end <= start:
            return ""
        self._num_certain = end
        if self._prompt is not None:  # its last character may have been completed
            start = max(start, len(os.path.commonprefix([self._prompt, self._text])))
            self._prompt = None
        return self._text[start:end]

    def _move(self, *, is_broken: bool) -> None:
        """Leave out the first tokens, unless the others are another text without them."""
        num_open = len(self._text) - self._num_certain
        text = self._codec.decode(np.asarray(self._tokens[-_KEPT:], np.int32))
        unbroken = text.lstrip(_BROKEN)
        if is_broken or (len(unbroken) > max(num_open, 0) and self._text.endswith(unbroken)):
            self._tokens = self._tokens[-_KEPT:]
            self._num_certain = max(len(text) - num_open, 0)
            self._text = text

    def _decode(self) -> str:
        return self._codec.decode(np.asarray(self._tokens, np.int32))


class StopMatcher:
    """Looks for stop strings in a text that grows (Knuth, Morris and Pratt, one string each)."""

    def __init__(self, stops: Sequence[str]):
        """Begin before the first character.

        Args:
            stops: Strings, none empty.
        """
        self._stops = [_StopString(stop) for stop in stops]
        self._num_read = 0

    @property
    def num_open(self) -> int:
        """Characters at the end of the text that may be the begin of a stop string."""
        return max((stop.num_matched for stop in self._stops), default=0)

    def add(self, text: str) -> tuple[int, int] | None:
        """Return where the stop string that begins first begins and ends; None without any.

        Args:
            text: The next part of the text; nothing is read behind a stop string.
        """
        places = list[tuple[int, int]]()
        for stop in self._stops:
            if (count := stop.add(text)) is not None:
                end = self._num_read + count
                places.append((end - len(stop.text), end))
        self._num_read += len(text)
        return min(places, key=lambda place: place[0], default=None)

    def skip(self, text: str) -> None:
        """Read a part of the text in which no stop string ends it.

        Args:
            text: The next part; a stop string that ends behind it may begin in it.
        """
        for stop in self._stops:
            stop.skip(text)
        self._num_read += len(text)


class _StopString:
    """How much of one stop string the text ends with.

    `_borders[k]` is the longest proper beginning of its first k characters that they end with too;
    `_next[k]` leaves out those that fail at the same character, so that a mismatch costs at most
    the logarithm of k. Both grow with the match: a string that never begins costs nothing.
    """

    def __init__(self, text: str):
        self.text = text
        self.num_matched = 0
        self._borders = [0, 0]
        self._next = [-1]

    def add(self, text: str) -> int | None:
        """Return how many characters of a text complete the string; None if none do."""
        stop = self.text
        matched = self.num_matched
        place = 0
        while place < len(text):
            if not matched:
                place = text.find(stop[0], place)
                if place < 0:
                    break
            matched = self._step(matched, text[place])
            place += 1
            if matched == len(stop):
                self.num_matched = 0
                return place
        self.num_matched = matched
        return None

    def skip(self, text: str) -> None:
        """Read a text, and go on behind the string wherever it is whole."""
        place = 0
        while (count := self.add(text[place:])) is not None:
            place += count
            self.num_matched = self._border()

    def _border(self) -> int:
        """Return the longest proper beginning that the string, once matched, ends with too."""
        stop = self.text
        last = len(stop) - 1
        border = self._borders[last] if last else -1
        while border >= 0 and stop[border] != stop[last]:
            border = self._next[border]
        return border + 1

    def _step(self, matched: int, character: str) -> int:
        """Return how much is matched behind a character."""
        stop = self.text
        while len(self._next) <= matched:
            self._grow()
        while matched >= 0 and stop[matched] != character:
            matched = self._next[matched]
        return matched + 1

    def _grow(self) -> None:
        """Extend the tables by the next length."""
        stop, borders, size = self.text, self._borders, len(self._next)
        if size > 1:
            border = borders[size - 1]
            while border >= 0 and stop[border] != stop[size - 1]:
                border = self._next[border]
            borders.append(border + 1)
        border = borders[size]
        self._next.append(self._next[border] if stop[border] == stop[size] else border)


class TextStream:
    """Turns the tokens of one answer into text, in parts that only grow.

    Each token costs the same in a long answer as in a short one.
    """

    def __init__(
        self,
        codec: TextCodec | None,
        stop: Sequence[str] = (),
        prompt: Sequence[int] | np.ndarray = (),
        *,
        min_tokens: int = 0,
        has_stop: bool = False,
    ):
        """Begin an answer.

        Args:
            codec: Decoder of tokens; None gives no text.
            stop: Strings that end the text, which is cut before them.
            prompt: Token ids that the answer continues.
            min_tokens: Tokens within which no stop string ends the text.
            has_stop: Whether the text is cut behind a stop string instead.
        """
        self._detokenizer = None if codec is None else Detokenizer(codec, prompt)
        self._stops = StopMatcher(stop)
        self._has_stop = has_stop
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._open = collections.deque[str]()
        """Parts of the text that may be the begin of a stop string."""
        self._num_open = 0
        """Characters of these parts."""
        self._num_searched = 0
        """Characters in which stop strings were looked for."""
        self.is_stopped = False
        """Whether a stop string was met."""

    def add(self, token: int) -> str:
        """Take a token and return the new text that is certain.

        Args:
            token: Its id.
        """
        if self._detokenizer is None or self.is_stopped:
            return ""
        self._num_tokens += 1
        return self._search(self._detokenizer.add(token))

    def finish(self) -> str:
        """Return the text that was held back, cut before a stop string."""
        if self._detokenizer is None or self.is_stopped:
            return ""
        text = self._search(self._detokenizer.finish())
        return text if self.is_stopped else text + self._show(self._num_open)

    def _search(self, text: str) -> str:
        """Return what is certain of the open text and some more, up to a stop string."""
        match = None
        if self._num_tokens > self._min_tokens:
            match = self._stops.add(text)
        else:
            self._stops.skip(text)
        if text:
            self._open.append(text)
        self._num_open += len(text)
        self._num_searched += len(text)
        if match is None:
            return self._show(self._num_open - self._stops.num_open)
        self.is_stopped = True
        end = match[1] if self._has_stop else match[0]
        return self._show(end - (self._num_searched - self._num_open))

    def _show(self, count: int) -> str:
        """Return the first characters of the open text, which it has no longer."""
        parts = list[str]()
        self._num_open -= count
        while count > 0:
            part = self._open.popleft()
            if len(part) > count:
                self._open.appendleft(part[count:])
                part = part[:count]
            parts.append(part)
            count -= len(part)
        return "".join(parts)
