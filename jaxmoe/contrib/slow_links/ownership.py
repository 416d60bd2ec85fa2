# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Rows of parameters that belong to one worker each, such as experts."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxmoe.contrib.slow_links.fragments import Leaf


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Ownership:
    """Row e of n belongs to the worker floor(e R / n) of R."""

    workers: int
    axis: str
    """Logical axis whose rows are divided; other parameters belong to all."""

    def dimension(self, leaf: Leaf) -> int | None:
        """Return the dimension that is divided; None for a parameter of all workers."""
        return leaf.axes.index(self.axis) if self.axis in leaf.axes else None

    def owner(self, row: Any, total: Any) -> Any:
        """Return the worker to whom a row of a number of rows belongs."""
        return row * self.workers // total

    def most(self, total: int) -> int:
        """Return the rows of the worker with the most."""
        return -(-total // self.workers)

    def begin(self, total: int, count: int) -> Int[Array, " R"]:
        """Return where a window of `held` rows begins that has all of a worker's rows.

        Args:
            total: Number of rows.
            count: Rows of the window, at least `most(total)`.
        """
        first = -(-jnp.arange(self.workers) * total // self.workers)
        return jnp.minimum(first, total - count)

    def mask(self, leaf: Leaf, worker: Int[Array, ""]) -> Bool[Array, ...] | None:
        """Return which rows belong to a worker, with the dimensions of the parameter.

        Args:
            leaf: Parameter.
            worker: Number of the worker.
        """
        if (dimension := self.dimension(leaf)) is None:
            return None
        size = leaf.shape[dimension]
        is_owned = self.owner(jnp.arange(size, dtype=jnp.int32), size) == worker
        return is_owned.reshape([-1 if d == dimension else 1 for d in range(len(leaf.shape))])
