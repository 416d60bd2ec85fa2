# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""What an executor gets: the work of a plan, with pages taken and tokens named."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from jaxmoe.serve.requests import Sampling


@dataclasses.dataclass(slots=True)
class Work:
    """Tokens of one sequence in a step. Not frozen: there is one for each token of an answer, and
    a frozen one takes several times as long to make."""

    id: int
    """Sequence."""
    tokens: Sequence[int]
    """Token ids to compute; the last is `PENDING` where the step before draws it."""
    start: int
    """Position of the first of them."""
    pages: tuple[int, ...]
    """Table of pages, which covers these tokens; page i holds positions i G to (i + 1) G - 1."""
    draws: bool
    """Whether a token is drawn from the last output."""
    index: int
    """Number of the drawn token within the answer, from 0."""
    sampling: Sampling
    adapter: str = ""
    """Adapter of the sequence; empty for the model itself."""
    history: Sequence[int] = ()
    """Tokens of prompt and answer, where one is drawn with penalties or a grammar, or something of
    all tokens of the prompt is returned, or `Facts.tells_history` asks for it; else empty. The last
    is `PENDING` where that of `tokens` is."""

    @property
    def reads_prompt(self) -> bool:
        """Whether something of all tokens of the prompt is returned, which this is a part of."""
        return self.sampling.reads_prompt and not self.index


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Swap:
    """Pages of a sequence that travel between device and host memory."""

    id: int
    """Sequence."""
    pages: tuple[int, ...]
    """Pages of the device."""
    num_tokens: int
    """Computed tokens in them."""
    kept: int = 0
    """Pages at the beginning of which host memory has a copy already; they need not travel."""
    names: tuple[bytes, ...] = ()
    """Names of the full pages, under which their copies stay in host memory."""
    dropped: tuple[bytes, ...] = ()
    """Names of which the copies are dropped after this swap."""

    @property
    def num_runs(self) -> int:
        """Copies that move the other pages: one for each run of pages side by side."""
        pages = self.pages[self.kept :]
        return sum(not i or page != pages[i - 1] + 1 for i, page in enumerate(pages))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EngineStep:
    """The work of a plan. An executor does `copies`, `out`, `back` and the work, in this order."""

    singles: tuple[Work, ...]
    pieces: tuple[Work, ...]
    out: tuple[Swap, ...] = ()
    """Pages to copy to host memory before they are overwritten."""
    back: tuple[Swap, ...] = ()
    """Pages to copy from host memory."""
    copies: tuple[tuple[int, int], ...] = ()
    """Pages (from, to) to copy on the device."""
    dropped: tuple[int, ...] = ()
    """Swapped sequences that ended: their host memory is free."""
    is_foreseen: bool = False
    """Whether the next step may start before the results of this one are known."""

    @property
    def works(self) -> Iterator[Work]:
        """Singles, then pieces."""
        yield from self.singles
        yield from self.pieces

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(len(work.tokens) for work in self.works)
