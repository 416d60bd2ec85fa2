# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Keeps the experts that routers chose for the tokens in all pages, in host memory.

What a page holds was computed with these experts, whichever request has computed it, so that they
are shared, copied, swapped and moved as the page is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxmoe.models.config import ModelConfig
from jaxmoe.serve.step import Work


class PageExperts:
    """Experts of the tokens in all pages, [P G L K]; E marks an empty slot.

    Args:
        model: Model that is served.
        num_pages: Pages of the pools.
        page_size: Tokens of a page.
        is_kept: Whether experts are recorded; the array is empty otherwise.
    """

    def __init__(self, model: ModelConfig, num_pages: int, page_size: int, *, is_kept: bool):
        layers = model.num_moe_layers if is_kept else 0
        routed, top_k = (1, 0) if model.moe is None else (model.moe.num_routed, model.moe.top_k)
        shape = (num_pages, page_size, layers, top_k)
        self._experts = np.zeros(shape, np.min_scalar_type(routed))

    def write(self, work: Work, experts: Any) -> None:
        """Record the experts of the tokens of a step.

        Args:
            work: Part of a request.
            experts: Experts of its tokens [L tokens K].
        """
        self._experts[self._places(work, work.start)] = experts.swapaxes(0, 1)

    def read(self, work: Work) -> np.ndarray | None:
        """Return the experts that a request has not got yet; None where it asks for none.

        Args:
            work: Part of a request that draws a token.
        """
        if not work.sampling.has_experts:
            return None
        last = work.start + len(work.tokens) - 1
        return self._experts[self._places(work, last if work.index else 0)]

    def take(self, pages: Sequence[int]) -> np.ndarray:
        """Return those of some pages [pages G L K]."""
        return self._experts[list(pages)]

    def put(self, pages: Sequence[int], experts: np.ndarray) -> None:
        """Write those of some pages, the first of what was taken."""
        self._experts[list(pages)] = experts[: len(pages)]

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy those of some pages (from, to)."""
        for source, target in pairs:
            self._experts[target] = self._experts[source]

    def adopt(self, source: PageExperts) -> None:
        """Take over those of an executor of the same sizes."""
        self._experts = source._experts.copy()

    def _places(self, work: Work, first: int) -> tuple[np.ndarray, np.ndarray]:
        """Return page and place in it of the tokens of a sequence from a position on."""
        where = np.arange(first, work.start + len(work.tokens))
        page, place = np.divmod(where, self._experts.shape[1])
        return np.asarray(work.pages)[page], place
