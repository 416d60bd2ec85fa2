# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Interface of parsers of calls: how models of one family write calls of functions.

To add one: a config that extends `ToolParserConfig` in a file of its own in this folder, its row
under `tool_parser` in `jaxmoe/catalog/serving.py`, and a row in
`tests/jaxmoe/serve/http/test_tool_parsers.py`.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Collection, Iterator
from typing import ClassVar

from jaxmoe.serve.http.tools.call import CallSpelling, FunctionCall, MessagePart, call_parts, new_id
from jaxmoe.serve.http.tools.reader import CallReader, Incomplete, JsonSpan, NoCall


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ToolParserConfig(abc.ABC):
    """A parser of calls."""

    name: ClassVar[str]
    marks: ClassVar[tuple[str, ...]]
    """Texts around calls, which a tokenizer may have as special tokens."""
    openings: ClassVar[tuple[str, ...]]
    """Texts with which a call begins."""
    blank_openings: ClassVar[tuple[str, ...]]
    """Texts of one character with which it begins where nothing but whitespace stands between it
    and the begin of the answer, or the call before."""
    spelling: ClassVar[CallSpelling]
    """How calls are spelled where a request asks for them."""

    @abc.abstractmethod
    def fits(self, template: str) -> bool:
        """Return whether a chat template writes calls so.

        Args:
            template: Its text, in the language of jinja2.
        """

    @abc.abstractmethod
    def read(self, reader: CallReader, names: Collection[str]) -> tuple[FunctionCall, ...]:
        """Return the calls at the begin of a text, and move the reader behind them.

        Args:
            reader: Text from an opening on.
            names: Functions that may be called.

        Raises:
            Incomplete: The text so far does not say.
            NoCall: There is no call.
        """

    def stream(self, names: Collection[str], *, is_parallel: bool = True) -> CallStream:
        """Return what reads one answer part by part.

        Args:
            names: Functions that may be called.
            is_parallel: Whether there may be several calls; otherwise the first is taken.
        """
        return CallStream(self, names, is_parallel=is_parallel)

    def parse(self, text: str, names: Collection[str]) -> tuple[MessagePart, ...]:
        """Return the parts of the message of a whole answer.

        Args:
            text: The answer.
            names: Functions that may be called.
        """
        stream = self.stream(names)
        return (*stream.add(text), *stream.finish())


class CallStream:
    """Content and calls of an answer that grows.

    A call is passed on when it is whole. What begins like a call and is none is content.
    """

    def __init__(self, parser: ToolParserConfig, names: Collection[str], *, is_parallel: bool):
        """Begin an answer.

        Args:
            parser: How calls are written.
            names: Functions that may be called.
            is_parallel: Whether there may be several calls; otherwise the first is taken.
        """
        self._parser, self._names, self._is_parallel = parser, names, is_parallel
        self._text = ""
        self._spans = dict[int, JsonSpan]()
        self._space = ""
        self._is_blank = True
        self._is_open = False
        """Whether the text begins with an opening, and more of it is waited for."""
        self._count = 0

    def add(self, text: str) -> list[MessagePart]:
        """Return what a part of the answer adds.

        Args:
            text: The part.
        """
        self._text += text
        return list(self._advance(is_whole=False))

    def finish(self) -> list[MessagePart]:
        """Return what the end of the answer adds. Space at the end is left out behind calls."""
        parts = list(self._advance(is_whole=True))
        if self._space and not self._count:
            parts.append(MessagePart(content=self._space))
        return parts

    def _advance(self, *, is_whole: bool) -> Iterator[MessagePart]:
        while self._text:
            place = 0 if self._is_open else self._opening(is_whole=is_whole)
            yield from self._content(self._text[:place])
            self._forget(place)
            if not self._text:
                return
            reader = CallReader(self._text, self._spans, is_whole=is_whole)
            try:
                calls = self._parser.read(reader, self._names)
            except Incomplete:
                openings = (*self._parser.openings, *self._parser.blank_openings)
                self._is_open = self._text.startswith(openings)
                return
            except NoCall:
                yield from self._content(self._text[0])
                self._forget(1)
                continue
            self._forget(reader.place)
            self._is_blank = True
            for call in calls:
                if self._is_parallel or not self._count:
                    yield from call_parts(call, self._count, new_id())
                self._count += 1

    def _opening(self, *, is_whole: bool) -> int:
        """Return the first place at which a call may begin; the length of the text without any."""
        text = self._text
        openings = self._parser.openings
        places = [place for mark in openings if (place := text.find(mark)) >= 0]
        if not is_whole:
            places += [len(text) - _overlap(text, mark) for mark in openings]
        start = len(text) - len(text.lstrip())
        if self._is_blank and text[start:].startswith(self._parser.blank_openings):
            places.append(start)
        return min(places, default=len(text))

    def _forget(self, count: int) -> None:
        """Leave out the first characters of the text."""
        if count:
            self._is_open = False
            self._text = self._text[count:]
            self._spans.clear()

    def _content(self, text: str) -> Iterator[MessagePart]:
        """Yield content up to its last space, which is content where more follows."""
        content = (self._space + text).rstrip()
        self._space = (self._space + text)[len(content) :]
        if content:
            self._is_blank = False
            yield MessagePart(content=content)


class SpelledStream:
    """Calls of an answer whose grammar is that of `CallSpelling`; arguments come as they grow.

    An answer that ends within a call has the arguments so far.
    """

    def __init__(self, parser: ToolParserConfig, names: Collection[str]):
        """Begin an answer.

        Args:
            parser: How calls are written.
            names: Functions that may be called.
        """
        self._parser = parser
        self._before = {parser.spelling.before_arguments(name): name for name in names}
        self._text = ""
        self._count = 0
        self._span: JsonSpan | None = None
        self._num_sent = 0

    def add(self, text: str) -> list[MessagePart]:
        """Return what a part of the answer adds.

        Args:
            text: The part.
        """
        self._text += text
        return list(self._advance(is_whole=False))

    def finish(self) -> list[MessagePart]:
        """Return what the end of the answer adds."""
        parts = list(self._advance(is_whole=True))
        if self._text and self._span is None and not self._count:  # no call has begun
            parts.append(MessagePart(content=self._text))
        return parts

    def _advance(self, *, is_whole: bool) -> Iterator[MessagePart]:
        while self._text:
            if self._span is not None:
                yield from self._arguments()
                if self._span is not None:
                    return
            spelling = self._parser.spelling
            reader = CallReader(self._text, {}, is_whole=is_whole)
            try:
                if self._count:
                    reader.take(spelling.after)
                    reader.take(spelling.between)
                else:
                    reader.take(spelling.begin)
                name = self._name(reader)
            except (Incomplete, NoCall):
                return
            yield MessagePart(call=self._count, id=new_id(), name=name)
            self._text = self._text[reader.place :]
            self._span = JsonSpan(0)
            self._num_sent = 0

    def _name(self, reader: CallReader) -> str:
        """Return the function whose call begins here; no begin of a call begins another."""
        is_incomplete = False
        for before, name in self._before.items():
            try:
                if reader.accepts(before):
                    return name
            except Incomplete:
                is_incomplete = True
        raise Incomplete if is_incomplete else NoCall

    def _arguments(self) -> Iterator[MessagePart]:
        """Yield what is new of the arguments, and forget the span at its end."""
        assert self._span is not None  # the caller has looked
        end = self._span.end(self._text)
        stop = len(self._text) if end is None else end
        if stop > self._num_sent:
            yield MessagePart(call=self._count, arguments=self._text[self._num_sent : stop])
        self._num_sent = stop
        if end is not None:
            self._text = self._text[end:]
            self._span = None
            self._count += 1


def _overlap(text: str, mark: str) -> int:
    """Return how many characters at the end of a text a mark may begin with."""
    sizes = range(min(len(mark) - 1, len(text)), 0, -1)
    return next((size for size in sizes if text.endswith(mark[:size])), 0)
