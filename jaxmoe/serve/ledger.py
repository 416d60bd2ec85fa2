# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Counts the pages that a plan would leave, without touching the pool.

`jaxmoe/serve/draft.py` composes plans by it and `jaxmoe/serve/rules.py` checks them by it, so that
a plan that fits one fits the other.
"""

from __future__ import annotations

from collections.abc import Iterable

from jaxmoe.serve.blocks import BlockPool


class PageLedger:
    """Free pages after some sequences were evicted, admitted and extended."""

    def __init__(self, pool: BlockPool):
        self._pool = pool
        self._change: dict[int, int] = {}
        self.free = pool.num_free
        """Pages left; below zero the plan does not fit."""

    def give(self, pages: Iterable[int]) -> None:
        """Count a table that is given back."""
        for page in pages:
            count = self._count(page, -1)
            self.free += count == 0

    def share(self, pages: Iterable[int]) -> None:
        """Count cached pages that a sequence takes over."""
        for page in pages:
            count = self._count(page, +1)
            self.free -= count == 1

    def take(self, count: int) -> None:
        """Count new pages."""
        self.free -= count

    def _count(self, page: int, by: int) -> int:
        self._change[page] = self._change.get(page, 0) + by
        return self._pool.references(page) + self._change[page]
