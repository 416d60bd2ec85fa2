# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""A request on its way through an instance, and what policies see of it.

`SequencePages` takes the pages of the sequences of an instance, names those that are full and gives
them back.
"""

from __future__ import annotations

import array
import collections.abc
import dataclasses
from typing import Literal

import numpy as np

from jaxmoe.serve.blocks import BlockPool, num_pages, page_names, root_name
from jaxmoe.serve.requests import PromptScore, Request, Result

Tokens = collections.abc.Sequence[int]
"""Token ids in a tuple, a list or an array."""
PENDING = -1
"""Stands for a token that a step draws which has not ended."""
_MUTABLE = (list, array.array)
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
    tokens: Tokens
    """Prompt and written tokens; the prompt of the request itself until the first is written. The
    last `num_pending` of them are `PENDING`."""
    state: State = "waiting"
    pages: list[int] = dataclasses.field(default_factory=list)
    """Table of pages."""
    computed: int = 0
    """Tokens whose keys and values are in the pages."""
    named: int = 0
    """Pages of the table that were offered a name."""
    is_busy: bool = False
    """Whether it waits for the end of a step that computes it. Where steps are foreseen, a sequence
    is free when its step has started, as if that had ended."""
    num_pending: int = 0
    """Tokens that steps draw which have not ended."""
    is_leaving: bool = False
    """Whether it takes part in no further step, until it moves to another instance or stays."""
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
    id: int = dataclasses.field(init=False)
    """Number of the request."""
    num_prompt: int = dataclasses.field(init=False)
    """Tokens of the prompt."""
    reads_more: bool = dataclasses.field(init=False)
    """Whether some of its works read tokens beside those that they compute."""
    scores: list[PromptScore] = dataclasses.field(default_factory=list)
    """Scores of the tokens of the prompt behind its first, as far as they are computed."""
    state_sum: np.ndarray | None = None
    """Sum [D] of the hidden states of the tokens of the prompt so far: in float64 and one by one,
    so that it does not depend on the pieces of the prompt."""
    _names: list[bytes] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        request = self.request
        self.id = request.id
        self.num_prompt = len(request.prompt)
        sampling = request.sampling
        self.reads_more = sampling.has_history or sampling.reads_prompt

    @property
    def is_free(self) -> bool:
        """Whether a step may compute it."""
        return not (self.is_busy or self.is_leaving)

    @property
    def num_written(self) -> int:
        """Tokens of the answer, pending ones included."""
        return len(self.tokens) - self.num_prompt

    @property
    def reads_prompt(self) -> bool:
        """Whether something of all tokens of the prompt is returned as they are computed."""
        is_asked = self.reads_more and self.request.sampling.reads_prompt
        return is_asked and not self.num_written

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
        names = self._names
        size = self.page_size
        begin = len(names) * size
        end = len(self.tokens) - self.num_pending
        if begin + size <= end:
            request = self.request
            parent = names[-1] if names else root_name(request.adapter, request.salt)
            names += page_names(parent, self.tokens[begin:end], size)
        return names

    def prefix_names(self) -> list[bytes]:
        """Return the names of the pages that may be taken from the pool.

        The last token is always computed, because its output is needed; so are all tokens of a
        prompt whose scores or mean state are asked for, which no page holds.
        """
        if self.reads_prompt:
            return []
        return self.names()[: (len(self.tokens) - 1) // self.page_size]

    def note_prompt(self, start: int, result: Result) -> None:
        """Take over what a step has computed of the tokens of the prompt.

        Args:
            start: Place of the first of them.
            result: Result of the step.
        """
        if result.prompt is not None:
            self.scores[start:] = result.prompt
        if result.states is not None:
            states = np.asarray(result.states, np.float64)
            sum_before = [] if not start or self.state_sum is None else [self.state_sum]
            self.state_sum = np.add.reduce([*sum_before, *states])

    def with_prompt(self, result: Result) -> Result:
        """Return the result of the first token with what is returned of the whole prompt."""
        scores = None if result.prompt is None else tuple(self.scores)
        embedding = result.embedding
        if self.state_sum is not None:
            embedding = (self.state_sum / len(self.request.prompt)).astype(np.float32)
        return dataclasses.replace(result, prompt=scores, embedding=embedding, states=None)

    def append(self, token: int, now: float) -> None:
        """Add a written token.

        Args:
            token: Its id.
            now: Time, seconds.
        """
        tokens = self.tokens
        if tokens is self.request.prompt or not isinstance(tokens, _MUTABLE):
            tokens = self._own_tokens()
        tokens.append(token)
        self.last = now
        if self.first is None:
            self.first = now

    def expect(self) -> None:
        """Add a token that a step which has started will draw."""
        self._own_tokens().append(PENDING)
        self.num_pending += 1

    def fulfil(self, token: int, now: float) -> None:
        """Write the first token that is pending.

        Args:
            token: Its id.
            now: Time, seconds.
        """
        self._own_tokens()[-self.num_pending] = token
        self.num_pending -= 1
        self.last = now
        if self.first is None:
            self.first = now

    def forget_pending(self) -> None:
        """Leave out the tokens that are pending; the answer has ended before them."""
        if self.num_pending:
            del self._own_tokens()[-self.num_pending :]
            self.num_pending = 0

    def _own_tokens(self) -> list[int] | array.array[int]:
        """Return the tokens, which are not those of the request itself any more."""
        tokens = self.tokens
        if tokens is self.request.prompt or not isinstance(tokens, _MUTABLE):
            self.tokens = tokens = tokens[:] if isinstance(tokens, array.array) else [*tokens]
        return tokens


class SequencePages:
    """`Sequence.pages` and `Sequence.named` of all sequences that have pages of one pool."""

    def __init__(self, pool: BlockPool, *, has_sharing: bool):
        """Make tables for the pages of a pool.

        Args:
            pool: Pages.
            has_sharing: Whether pages get names, by which requests share equal beginnings.
        """
        self.pool = pool
        self._has_sharing = has_sharing

    def begin(self, sequence: Sequence, hits: collections.abc.Sequence[int]) -> None:
        """Begin the table of a sequence with cached pages.

        Args:
            sequence: Sequence without pages.
            hits: Pages that hold its first tokens.
        """
        self.pool.share(hits)
        sequence.pages = list(hits)
        sequence.named = len(hits)

    def grow(self, sequence: Sequence, num_tokens: int) -> None:
        """Take the pages that a table lacks.

        Args:
            sequence: Sequence of the table.
            num_tokens: Tokens that it shall hold.

        Raises:
            AssertionError: The pool has too few pages.
        """
        count = num_pages(num_tokens, self.pool.page_size) - len(sequence.pages)
        if count > 0:
            pages = self.pool.take(count, sequence.pages[-1] if sequence.pages else None)
            if pages is None:
                raise AssertionError(f"{count} pages for sequence {sequence.id} are lacking")
            sequence.pages += pages

    def cover(self, sequence: Sequence, start: int, end: int) -> None:
        """Take the pages for tokens that a step writes.

        Args:
            sequence: Sequence of the tokens.
            start: Position of the first.
            end: Position behind the last.

        Raises:
            AssertionError: The pool has too few pages, or another sequence reads one of them.
        """
        size = self.pool.page_size
        if end > len(sequence.pages) * size:
            self.grow(sequence, end)
        for page in sequence.pages[start // size : (end - 1) // size + 1]:
            if not self.pool.is_writable(page):
                raise AssertionError(
                    f"sequence {sequence.id} would write to a shared or named page"
                )

    def name(self, sequence: Sequence, num_tokens: int) -> None:
        """Name the pages that are full of the first tokens of a sequence, which are known.

        Args:
            sequence: Sequence of the table.
            num_tokens: Tokens that are computed.
        """
        size = self.pool.page_size
        if not self._has_sharing or num_tokens < (sequence.named + 1) * size:
            return
        names = sequence.names()
        for number in range(sequence.named, num_tokens // size):
            self.pool.name(sequence.pages[number], names[number])
            sequence.named = number + 1

    def give_back(self, sequence: Sequence) -> None:
        """Give all pages of a sequence back.

        Args:
            sequence: Sequence of the table.
        """
        self.pool.give(sequence.pages)
        sequence.pages = []
