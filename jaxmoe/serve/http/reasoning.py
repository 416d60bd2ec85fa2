# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Reasoning of an answer: what stands before its content, and how it is told from it.

To add a parser: a config that extends `ReasoningParserConfig`, its row under `reasoning_parser` in
`jaxmoe/catalog/serving.py`, and a row in `tests/jaxmoe/serve/http/test_reasoning.py`.
"""

from __future__ import annotations

import abc
import dataclasses
import json
import re
from typing import ClassVar, Literal

from jaxmoe.catalog import Registry

REASONING_PARSERS = Registry("reasoning_parser")
Piece = tuple[Literal["reasoning", "content"], str]
"""A text, and what it is a part of."""


class PlainStream:
    """An answer without reasoning."""

    @property
    def places(self) -> tuple[int, int]:
        """Characters of the answer before the reasoning, and before what follows it."""
        return 0, 0

    def add(self, text: str) -> list[Piece]:
        """Return a part of the answer as content.

        Args:
            text: The part.
        """
        return [("content", text)] if text else []

    def finish(self) -> list[Piece]:
        """Return nothing: no text is held back."""
        return []


class ThinkStream(PlainStream):
    """An answer whose reasoning stands between two tags.

    Space around the reasoning, and before the content behind it, belongs to neither.
    """

    def __init__(self, opening: str, closing: str, *, is_open: bool):
        """Begin an answer.

        Args:
            opening: Tag before the reasoning.
            closing: Tag behind it.
            is_open: Whether the prompt ends with the opening tag.
        """
        self._opening, self._closing = opening, closing
        self._text = ""
        self._kind: Literal["begin", "lead", "reasoning", "space", "content"] = "begin"
        self._is_open = is_open
        self._num_read = 0
        self._first = 0
        self._last = 0

    @property
    def places(self) -> tuple[int, int]:
        """Characters of the answer before the reasoning, and before what follows it."""
        return self._first, self._last

    def add(self, text: str) -> list[Piece]:
        """Return what a part of the answer adds."""
        self._text += text
        self._num_read += len(text)
        return self._pieces(is_whole=False)

    def finish(self) -> list[Piece]:
        """Return the text that was held back."""
        return self._pieces(is_whole=True)

    def _pieces(self, *, is_whole: bool) -> list[Piece]:
        pieces = list[Piece]()
        if self._kind == "begin":
            self._begin(is_whole=is_whole)
        if self._kind == "lead":
            self._text = self._text.lstrip()
            self._kind = "reasoning" if self._text else "lead"
            self._first = self._last = self._num_read - len(self._text)
        if self._kind == "reasoning":
            pieces += self._reasoning(is_whole=is_whole)
        if self._kind == "space":
            self._text = self._text.lstrip()
            self._kind = "content" if self._text else "space"
        if self._kind == "content" and self._text:
            pieces.append(("content", self._text))
            self._text = ""
        return pieces

    def _begin(self, *, is_whole: bool) -> None:
        """Find out whether the answer begins with reasoning; models repeat an open tag."""
        text = self._text.lstrip()
        if text.startswith(self._opening):
            self._text = text[len(self._opening) :]
            self._kind = "lead"
        elif is_whole or not self._opening.startswith(text):
            self._kind = "lead" if self._is_open else "content"

    def _reasoning(self, *, is_whole: bool) -> list[Piece]:
        """Return the reasoning up to the last space, or to a tag."""
        text, mark, behind = self._text.partition(self._closing)
        if mark:
            self._kind = "space"
            self._text = behind
            return self._piece(text.rstrip())
        sizes = range(min(len(self._closing) - 1, len(text)), 0, -1)
        overlap = next((size for size in sizes if text.endswith(self._closing[:size])), 0)
        certain = text if is_whole else text[: len(text) - overlap].rstrip()
        self._text = text[len(certain) :]
        return self._piece(certain.rstrip())

    def _piece(self, text: str) -> list[Piece]:
        """Return a part of the reasoning, behind the one before it; nothing where it is empty."""
        self._last += len(text)
        return [("reasoning", text)] if text else []


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReasoningParserConfig(abc.ABC):
    """How the reasoning of an answer is told from its content."""

    name: ClassVar[str]
    marks: ClassVar[tuple[str, ...]]
    """Texts around reasoning, which a tokenizer may have as special tokens."""

    @abc.abstractmethod
    def stream(self, prompt: str) -> PlainStream:
        """Return what reads one answer part by part.

        Args:
            prompt: End of the text of the prompt, where a template may have begun the reasoning.
        """

    @abc.abstractmethod
    def lark(self, prompt: str) -> str:
        """Return rules `reasoning` and those it needs, in the language of llguidance.

        Args:
            prompt: End of the text of the prompt.

        Returns:
            Rules of what may precede the content; empty where nothing does.
        """


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NoReasoningConfig(ReasoningParserConfig):
    """None: the whole answer is content."""

    name: ClassVar[str] = "none"
    marks: ClassVar[tuple[str, ...]] = ()

    def stream(self, prompt: str) -> PlainStream:
        """Return what passes all text on."""
        del prompt
        return PlainStream()

    def lark(self, prompt: str) -> str:
        """Return nothing."""
        del prompt
        return ""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ThinkTagsConfig(ReasoningParserConfig):
    """Between <think> and </think>, as DeepSeek-R1 and Qwen3 write it."""

    name: ClassVar[str] = "think_tags"
    opening: ClassVar[str] = "<think>"
    closing: ClassVar[str] = "</think>"
    marks: ClassVar[tuple[str, ...]] = (opening, closing)

    def stream(self, prompt: str) -> PlainStream:
        """Return what reads the tags; a closed one in the prompt means that there is none."""
        end = prompt.rstrip()
        if end.endswith(self.closing):
            return PlainStream()
        return ThinkStream(self.opening, self.closing, is_open=end.endswith(self.opening))

    def lark(self, prompt: str) -> str:
        """Return the tag that closes the reasoning, which an open one asks for."""
        end = prompt.rstrip()
        if end.endswith(self.closing):
            return ""
        closing = re.escape(self.closing).replace("/", "\\/")
        if end.endswith(self.opening):
            return f"reasoning: thoughts SPACE\nthoughts[lazy]: /(?s:.*){closing}/\nSPACE: /\\s*/\n"
        opening = json.dumps(self.opening)
        return (
            f"reasoning: ({opening} thoughts SPACE)?\n"
            f"thoughts[lazy]: /(?s:.*){closing}/\nSPACE: /\\s*/\n"
        )
