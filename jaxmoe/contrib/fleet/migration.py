# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Moves one running sequence to another instance, in stages between which it may be taken back.

    running     full pages are copied while the source goes on decoding; they never change
    moving      at most one page is left: the sequence pauses, and the rest is copied
    landed      the target runs it, the source gives its pages back

A hand-over pauses from the beginning: its sequence has drawn its first token and is to draw no
further one at the source. Pages that the target has in its pool are shared and do not travel.
Until the landing the source keeps all pages, so that a move that ends early loses nothing.

Source: live migration of Llumnix (arXiv:2406.03243, section 4.2); hand-over of DistServe
(arXiv:2401.09670, section 4.3).
"""

from __future__ import annotations

import dataclasses

from jaxmoe.contrib.fleet.dispatch import Move
from jaxmoe.contrib.fleet.moves import depart, receive, release_departed, stay
from jaxmoe.serve.blocks import num_pages
from jaxmoe.serve.instance import Instance
from jaxmoe.serve.sequence import Sequence


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class Copy:
    """Pages whose content travels from one instance to another."""

    move: Move
    pages: tuple[int, ...]
    """Pages of the source."""
    to: tuple[int, ...]
    """Pages of the target."""
    is_paused: bool
    """Whether the sequence waits for this copy."""


class Migration:
    """A move under way."""

    def __init__(self, move: Move, source: Instance, target: Instance, *, is_live: bool):
        """Begin with the pages that the target has already.

        Args:
            move: Running sequence, and where it goes.
            source: Instance that runs it.
            target: Instance that will run it.
            is_live: Whether the source goes on decoding while full pages are copied.
        """
        self.move = move
        self.is_live = is_live
        self._source = source
        self._target = target
        self._one: Sequence = source.queues.running[move.id]
        self._preempted = self._one.preempted
        full = self._one.computed // source.facts.page_size
        hits = target.view(0.0).hits(self._one)[:full]
        target.pool.share(hits)
        self._pages = target.incoming[move.id] = list(hits)
        self._num_shared = self._num_copied = len(hits)
        self.copy: Copy | None = None
        """Copy under way."""
        self.is_over = self.has_landed = False

    def advance(self) -> Copy | None:
        """Go on, and return the copy that has to be executed before the next stage.

        For a sequence between two steps. A live move without room at the target ends; a hand-over
        waits for it.
        """
        if self.is_over or self.copy is not None:
            return None
        if not self._is_whole():
            self.abort()
            return None
        sequence = self._one
        if sequence.state == "running":
            full = sequence.computed // sequence.page_size - len(self._pages)
            if self.is_live and self._rest() > 1:
                return self._begin(full) if self._take(full) else self.abort()
            if sequence.is_busy or self._is_foreseen():
                sequence.is_leaving = self._is_foreseen()
                return None
            depart(self._source, sequence.id)
        num_left = self._rest()
        if num_left and not self._take(num_left):
            return self.abort() if self.is_live else None
        if self._num_copied < len(self._pages):
            return self._begin(len(self._pages) - self._num_copied)
        if receive(self._target, sequence, self._pages, self._num_shared) is None:
            return self.abort() if self.is_live else None
        del self._target.incoming[sequence.id]
        release_departed(self._source, sequence.id)
        self.is_over = self.has_landed = True
        return None

    def note_copy(self) -> None:
        """Note that the copy under way is done."""
        assert self.copy is not None  # asked by the caller
        self._num_copied += len(self.copy.pages)
        self.copy = None

    def abort(self) -> None:
        """Take the move back: the target gives its pages back, the source runs the sequence on."""
        if self.is_over:
            return
        self.is_over = True
        self.copy = None
        self._one.is_leaving = False
        self._target.pool.give(self._target.incoming.pop(self.move.id))
        if self._one.state == "moving":
            stay(self._source, self.move.id)

    def _is_whole(self) -> bool:
        """Return whether the source still holds the pages that were copied."""
        sequence = self._one
        return sequence.state in ("running", "moving") and sequence.preempted == self._preempted

    def _is_foreseen(self) -> bool:
        """Return whether a step has counted the sequence as computed, and has not ended.

        Its token is pending then, or the scores of a part of its prompt are.
        """
        steps = [step for step in self._source.flying if step.is_foreseen]
        return any(work.id == self._one.id for step in steps for work in step.works)

    def _rest(self) -> int:
        """Return the pages for which the target has none yet."""
        return num_pages(self._one.computed, self._one.page_size) - len(self._pages)

    def _take(self, count: int) -> bool:
        """Take pages of the target; for the whole rest only with a place among the running."""
        target = self._target
        is_full = len(target.queues.running) >= target.facts.max_running
        pages = None if is_full else target.pool.take(count)
        self._pages += pages or ()
        return pages is not None

    def _begin(self, count: int) -> Copy:
        first = self._num_copied
        self.copy = Copy(
            move=self.move,
            pages=tuple(self._one.pages[first : first + count]),
            to=tuple(self._pages[first : first + count]),
            is_paused=self._one.state == "moving",
        )
        return self.copy
