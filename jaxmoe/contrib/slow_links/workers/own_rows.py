# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Optimiser state of the rows of parameters that a worker trains, and of no others.

Where rows belong to one worker each (`ownership.py`), the optimiser of a worker
sees a window with its rows: gradients, parameters and state have that many. Windows of all workers
have the same length, so that some hold rows of a neighbour where the division is uneven; these have
no gradient. Optimisers treat each matrix by itself. Dimensions that the mesh of a worker cuts stay
whole.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int

from jaxmoe.contrib.slow_links.fragments import Leaf, flat, nest
from jaxmoe.contrib.slow_links.ownership import Ownership
from jaxmoe.contrib.slow_links.workers.arrays import Workers


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OwnRows:
    """An optimiser, of which each worker holds the state of its own rows."""

    optimizer: optax.GradientTransformation
    ownership: Ownership
    leaves: Mapping[str, Leaf]

    def begin(self, workers: Workers, params: Any, opt_state: Any) -> Any:
        """Return the states of all workers before the first step, [R ...].

        Args:
            workers: Workers.
            params: Parameters, equal on all workers.
            opt_state: State of the optimiser of all rows.
        """
        few = jax.eval_shape(lambda p: self.optimizer.init(self.window(p, jnp.int32(0))), params)
        cuts = jax.tree.map(_difference, jax.eval_shape(lambda: opt_state), few)

        def one(number: Int[Array, ""], owned: Any, inputs: Any, shared: Any) -> tuple[Any, Any]:
            del inputs, shared
            return jax.tree.map(lambda x, cut: self._part(x, cut, number), owned, cuts), ()

        return workers.each(one)(workers.stack(opt_state), (), ())[0]

    def of(self, number: Int[Array, ""]) -> optax.GradientTransformation:
        """Return the optimiser of a worker, for gradients and parameters of all rows.

        Args:
            number: Number of the worker.
        """
        update_few: Callable[..., Any] = self.optimizer.update

        def update(grads: Any, state: Any, params: Any = None, **options: Any) -> tuple[Any, Any]:
            window = None if params is None else self.window(params, number)
            updates, state = update_few(self.window(grads, number), state, window, **options)
            wide = flat(grads)
            few = flat(updates)
            for path, dimension, size in self._cut(wide):
                first = self.ownership.begin(wide[path].shape[dimension], size)[number]
                zeros = jnp.zeros_like(wide[path], dtype=few[path].dtype)
                few[path] = jax.lax.dynamic_update_slice_in_dim(zeros, few[path], first, dimension)
            return nest(few), state

        return self.optimizer._replace(update=update)

    def window(self, tree: Any, number: Int[Array, ""]) -> Any:
        """Return a tree of parameters with the rows of a worker.

        Args:
            tree: Parameters or gradients.
            number: Number of the worker.
        """
        arrays = dict(flat(tree))
        for path, dimension, size in self._cut(arrays):
            arrays[path] = self._part(arrays[path], (dimension, size), number)
        return nest(arrays)

    def _cut(self, arrays: Mapping[str, Array]) -> list[tuple[str, int, int]]:
        """Return the arrays that are cut, the dimension, and the rows of a window."""
        cuts = []
        for path, leaf in self.leaves.items():
            dimension = self.ownership.dimension(leaf)
            if dimension is not None and path in arrays and _is_whole(arrays[path], dimension):
                cuts.append((path, dimension, self.ownership.most(leaf.shape[dimension])))
        return cuts

    def _part(self, x: Array, cut: tuple[int, ...], number: Int[Array, ""]) -> Array:
        if not cut:
            return x
        dimension, size = cut
        first = self.ownership.begin(x.shape[dimension], size)[number]
        return jax.lax.dynamic_slice_in_dim(x, first, size, dimension)


def _difference(full: Any, few: Any) -> tuple[int, ...]:
    """Return the dimension in which two shapes differ, and the smaller size; () for none."""
    sizes = enumerate(zip(full.shape, few.shape, strict=True))
    return next(((d, size) for d, (wide, size) in sizes if wide != size), ())


def _is_whole(x: Array, dimension: int) -> bool:
    """Return whether no mesh axis cuts a dimension of an array."""
    place = jax.typeof(x).sharding
    entry = place.spec[dimension] or ()
    names = (entry,) if isinstance(entry, str) else entry
    return math.prod(place.mesh.shape[name] for name in names) == 1
