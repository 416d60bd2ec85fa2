# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""A request on its way through an instance, and what policies see of it."""

from __future__ import annotations

import dataclasses
from typing import Literal

from jaxmoe.serve.blocks import page_name, root_name
from jaxmoe.serve.requests import Request

State = Literal["waiting", "running", "swapped", "moving", "finished"]


@dataclasses.dataclass(eq=False, kw_only=True, slots=True)
class Sequence:
    """A request with its tokens, pages and times. Policies read it and change nothing.

    A preempted sequence keeps its written tokens: they are computed again with the prompt.
    """

    request: Request
    order: int
    """Number of the submission."""
    arrived: float
    """Time of the submission, seconds."""
    page_size: int
    """Tokens of a page."""
    tokens: list[int]
    """Prompt and written tokens."""
    state: State = "waiting"
    pages: list[int] = dataclasses.field(default_factory=list)
    """Table of pages."""
    computed: int = 0
    """Tokens whose keys and values are in the pages."""
    named: int = 0
    """Pages of the table that were offered a name."""
    is_busy: bool = False
    """Whether a step that has started and not ended computes it."""
    is_cancelled: bool = False
    """Whether it ends as soon as its step ends."""
    preempted: int = 0
    """Number of preemptions."""
    cached: int = 0
    """Tokens of the prompt found in the pool at the first admission."""
    admitted: float | None = None
    """Time of the first admission."""
    first: float | None = None
    """Time of the first written token."""
    last: float | None = None
    """Time of the last written token."""
    last_step: float = 0.0
    """Time of the last step that computed it."""
    _names: list[bytes] = dataclasses.field(default_factory=list)

    @property
    def id(self) -> int:
        """Number of the request."""
        return self.request.id

    @property
    def num_written(self) -> int:
        """Tokens of the answer."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def left(self) -> int:
        """Tokens to compute until a new one is drawn; 1 while decoding."""
        return len(self.tokens) - self.computed

    @property
    def rank(self) -> tuple[int, int]:
        """Order of service: priority, then arrival."""
        return (-self.request.priority, self.order)

    def names(self) -> list[bytes]:
        """Return the names of all full pages of the tokens."""
        size = self.page_size
        if not self._names and len(self.tokens) >= size:
            self._names.append(self._name(root_name(self.request.adapter, self.request.salt), 0))
        while (len(self._names) + 1) * size <= len(self.tokens):
            self._names.append(self._name(self._names[-1], len(self._names)))
        return self._names

    def prefix_names(self) -> list[bytes]:
        """Return the names of the pages that may be taken from the pool.

        The last token is always computed, because its output is needed.
        """
        return self.names()[: (len(self.tokens) - 1) // self.page_size]

    def _name(self, parent: bytes, number: int) -> bytes:
        size = self.page_size
        return page_name(parent, self.tokens[number * size : (number + 1) * size])
