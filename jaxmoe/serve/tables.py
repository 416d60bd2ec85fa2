# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Tables of pages of the sequences of one instance: taken, named when they are full, given back.

To add a change of a table: a method of `PageTables`, in `jaxmoe/serve/tables.py`.
"""

from __future__ import annotations

from collections.abc import Sequence as AnySequence

from jaxmoe.serve.blocks import BlockPool, num_pages
from jaxmoe.serve.sequence import Sequence


class PageTables:
    """`Sequence.pages` and `Sequence.named` of all sequences that have pages of one pool."""

    def __init__(self, pool: BlockPool, *, has_sharing: bool):
        """Make tables for the pages of a pool.

        Args:
            pool: Pages.
            has_sharing: Whether pages get names, by which requests share equal beginnings.
        """
        self.pool = pool
        self._has_sharing = has_sharing

    def begin(self, sequence: Sequence, hits: AnySequence[int]) -> None:
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
        for number in range(start // size, (end - 1) // size + 1):
            if not self.pool.is_writable(sequence.pages[number]):
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
