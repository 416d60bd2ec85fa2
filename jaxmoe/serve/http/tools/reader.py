# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Reads calls from the text of an answer, which may still grow.

A reading has one of three outcomes: it goes on, the text so far does not say yet (`Incomplete`), or
no further text can make it a call (`NoCall`). So what is read does not depend on how the text was
cut into parts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence

from jaxmoe.json_bounds import parse_json
from jaxmoe.serve.http.tools.call import FunctionCall

_PLAIN = re.compile(r"[\s0-9a-z.,:+E-]*")
"""What stands between the brackets and strings of JSON."""
_IN_STRING = re.compile(r'(?:[^"\\]++|\\.)*+', re.DOTALL)
_SPACE = re.compile(r"\s*")
_CLOSING = {"{": "}", "[": "]"}
_DECODER = json.JSONDecoder()


class Incomplete(Exception):
    """The text so far does not say whether it is a call."""


class NoCall(Exception):
    """The text is no call, whatever follows."""


class JsonSpan:
    """Finds the end of a JSON object or list whose text grows; each character is read once."""

    def __init__(self, start: int):
        """Begin at a place.

        Args:
            start: Place of the bracket that opens it.
        """
        self._place = start
        self._closing: list[str] = []
        self._is_string = False
        self._end: int | None = None

    def end(self, text: str) -> int | None:
        """Return the place behind the closing bracket; None if it is not in the text yet.

        Args:
            text: The text so far.

        Raises:
            NoCall: It is not JSON.
        """
        while self._end is None:
            pattern = _IN_STRING if self._is_string else _PLAIN
            match = pattern.match(text, self._place)
            self._place = match.end() if match else self._place
            if self._place == len(text) or (self._is_string and text[self._place] == "\\"):
                return None
            character = text[self._place]
            self._place += 1
            if character == '"':
                self._is_string = not self._is_string
            elif character in _CLOSING:
                self._closing.append(_CLOSING[character])
            elif self._closing and character == self._closing[-1]:
                self._closing.pop()
            else:
                raise NoCall
            if not self._closing:
                self._end = self._place
        return self._end


class CallReader:
    """Reads a text from its begin; `place` is how far."""

    def __init__(self, text: str, spans: dict[int, JsonSpan], *, is_whole: bool):
        """Begin to read.

        Args:
            text: Text from the begin of what may be a call.
            spans: JSON values that earlier readings of the same text began with, by place.
            is_whole: Whether no text follows.
        """
        self.text = text
        self.place = 0
        self.is_whole = is_whole
        self._spans = spans

    def skip_space(self) -> None:
        """Go on behind whitespace."""
        match = _SPACE.match(self.text, self.place)
        self.place = match.end() if match else self.place

    def accepts(self, mark: str) -> bool:
        """Go on behind a mark if it is next; return whether it was.

        Args:
            mark: The text.

        Raises:
            Incomplete: The text ends within the mark.
        """
        if self.text.startswith(mark, self.place):
            self.place += len(mark)
            return True
        if not self.is_whole and mark.startswith(self.text[self.place :]):
            raise Incomplete
        return False

    def take(self, mark: str) -> None:
        """Go on behind a mark.

        Args:
            mark: The text.

        Raises:
            Incomplete: The text ends within the mark.
            NoCall: Something else is next.
        """
        if not self.accepts(mark):
            raise NoCall

    def take_end(self, mark: str) -> None:
        """Go on behind the mark that ends a call, which the end of the text may cut off.

        Args:
            mark: The text.

        Raises:
            Incomplete: The text ends within the mark, and may go on.
            NoCall: Something else is next.
        """
        if self.is_whole and mark.startswith(self.text[self.place :]):
            self.place = len(self.text)
        else:
            self.take(mark)

    def take_until(self, marks: Sequence[str], pattern: str) -> str:
        """Return the text before the first of some marks, and go on before the mark.

        Args:
            marks: The texts.
            pattern: Regular expression that what precedes the marks matches, and each beginning of
                it.

        Raises:
            Incomplete: There is no mark yet.
            NoCall: Something else precedes it.
        """
        match = re.compile(pattern).match(self.text, self.place)
        end = match.end() if match else self.place
        places = (self.text.find(mark, self.place, end + len(mark)) for mark in marks)
        if ends := [place for place in places if place >= 0]:
            text = self.text[self.place : min(ends)]
            self.place = min(ends)
            return text
        if self.is_whole or not any(mark.startswith(self.text[end:]) for mark in marks):
            raise NoCall
        raise Incomplete

    def take_json(self, opening: str) -> str:
        """Return the text of a JSON object or list.

        Args:
            opening: Bracket that it begins with.

        Raises:
            Incomplete: It has not ended yet.
            NoCall: It is none.
        """
        start = self.place
        self.take(opening)
        end = self._spans.setdefault(start, JsonSpan(start)).end(self.text)
        if end is None:
            raise NoCall if self.is_whole else Incomplete
        self.place = end
        return self.text[start:end]


def read_calls(text: str, names: Collection[str]) -> tuple[FunctionCall, ...]:
    """Return the calls of an object with a name and arguments, or of a list of such objects.

    Args:
        text: JSON. The arguments are named `arguments` or `parameters`.
        names: Functions that may be called.

    Raises:
        NoCall: It is something else.
    """
    if not text.startswith("["):
        return (_read_call(text, names),)
    _parse(text)
    calls = []
    place = _after_space(text, 1)
    while text[place] != "]":
        _, end = _DECODER.raw_decode(text, place)
        calls.append(_read_call(text[place:end], names))
        place = _after_space(text, end)
        place = _after_space(text, place + (text[place] == ","))
    if not calls:
        raise NoCall
    return tuple(calls)


def read_object(text: str) -> str:
    """Return the text of the JSON object of arguments, which may be spelled as a JSON text.

    Args:
        text: JSON.

    Raises:
        NoCall: It is no object.
    """
    value = _parse(text)
    if isinstance(value, str):
        text = value
        value = _parse(text)
    if not isinstance(value, dict):
        raise NoCall
    return text.strip()


def _read_call(text: str, names: Collection[str]) -> FunctionCall:
    """Return the call of an object."""
    value = _parse(text)
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or name not in names:
        raise NoCall
    members = _members(text)
    arguments = members.get("arguments", members.get("parameters", "{}"))
    return FunctionCall(name, read_object("{}" if arguments == "null" else arguments))


def _members(text: str) -> dict[str, str]:
    """Return the texts of the values of a JSON object by name."""
    members = dict[str, str]()
    place = _after_space(text, 1)
    while text[place] != "}":
        name, end = _DECODER.raw_decode(text, place)
        start = _after_space(text, _after_space(text, end) + 1)  # behind the colon
        _, end = _DECODER.raw_decode(text, start)
        members[name] = text[start:end]
        place = _after_space(text, end)
        place = _after_space(text, place + (text[place] == ","))
    return members


def _after_space(text: str, place: int) -> int:
    match = _SPACE.match(text, place)
    return match.end() if match else place


def _parse(text: str) -> object:
    try:
        return parse_json(text)
    except ValueError as error:
        raise NoCall from error
