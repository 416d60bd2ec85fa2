# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Computes with arrays of several workers, [R ...]: at one place, or each at its place of a mesh.

The workers of low-communication training hold copies of the model that differ. They lie along the
mesh axis `replica`, or, where it has size 1, all on the same devices. Two kinds of functions:

    each      a whole computation of one worker, in layouts over the other mesh axes; it does not
              communicate with other workers
    together  arithmetic on what a device holds, which may use collectives over `axis`
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int

from sharding.axes import BATCH_AXES, REPLICA, pieces
from sharding.constrain import lie_at, place_at, reshape_to, surroundings
from sharding.regions import region

Tree = Any


@dataclasses.dataclass(frozen=True, slots=True)
class Workers:
    """Number of workers, and whether each has its own devices."""

    number: int
    is_spread: bool
    """Whether the mesh axis `replica` has a place for each worker."""

    @property
    def axis(self) -> str:
        """Name of the axis of workers, for collectives in `together`."""
        return REPLICA if self.is_spread else "worker"

    def spec(self, x: Array) -> PartitionSpec:
        """Return the spec of an array of each worker from that of one worker's."""
        return PartitionSpec(REPLICA if self.is_spread else None, *_spec(x))

    def stack(self, tree: Tree) -> Tree:
        """Return arrays of which every worker has an equal copy, [R ...]."""

        def copies(x: Array) -> Array:
            return place_at(jnp.broadcast_to(x, (self.number, *x.shape)), self.spec(x))

        return jax.tree.map(copies, tree)

    def rows(self, batch: Tree) -> Tree:
        """Return the rows of each worker, [R B/R ...]: consecutive rows of the batch."""

        def split(x: Array) -> Array:
            shape = (self.number, x.shape[0] // self.number, *x.shape[1:])
            if surroundings() != "explicit":
                return x.reshape(shape)
            names = jax.sharding.get_abstract_mesh().axis_names
            inner_axes = tuple(name for name in pieces(names, BATCH_AXES) if name != REPLICA)
            first = REPLICA if self.is_spread else None
            return reshape_to(x, shape, PartitionSpec(first, inner_axes, *(None,) * (x.ndim - 1)))

        return jax.tree.map(split, batch)

    def rows_around(self, batch: Tree, parts: int) -> Tree:
        """Return the rows of each worker and of those after it, [R parts B/R ...].

        Args:
            batch: Rows.
            parts: Number of workers whose rows each has, itself included; after the last comes the
                first.
        """
        rows = self.rows(batch)

        def around(x: Array) -> Array:
            return jnp.stack([jnp.roll(x, -part, axis=0) for part in range(parts)], axis=1)

        if surroundings() != "explicit":
            return jax.tree.map(around, rows)
        names = jax.sharding.get_abstract_mesh().axis_names
        specs = jax.tree.map(lambda x: PartitionSpec(_spec(x)[0], None, *_spec(x)[1:]), rows)
        return lie_at(lambda rows: jax.tree.map(around, rows), axes=names, specs=specs)(rows)

    def each(
        self, function: Callable[[Int[Array, ""], Tree, Tree, Tree], tuple[Tree, Tree]]
    ) -> Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]:
        """Return `function` of every worker.

        Args:
            function: (number of the worker, its state, further arrays of the worker, arrays that
                all share) -> (its state, laid out as before; results, equal on all its devices).

        Returns:
            A function of (states, further arrays, shared arrays), the first two [R ...], with the
            states and results of all workers.
        """

        def one_by_one(states: Tree, inputs: Tree, shared: Tree) -> tuple[Tree, Tree]:
            numbers = jnp.arange(self.number, dtype=jnp.int32)
            return jax.lax.map(
                lambda arguments: function(arguments[0], arguments[1], arguments[2], shared),
                (numbers, states, inputs),
            )

        def spread(states: Tree, inputs: Tree, shared: Tree) -> tuple[Tree, Tree]:
            def local(states: Tree, inputs: Tree, shared: Tree) -> tuple[Tree, Tree]:
                states, inputs = jax.tree.map(lambda x: jnp.squeeze(x, 0), (states, inputs))
                result = function(jax.lax.axis_index(REPLICA), states, inputs, shared)
                return jax.tree.map(lambda x: x[None], result)

            specs = (jax.tree.map(_spec, states), PartitionSpec(REPLICA))
            return region(local, axis=REPLICA, out_specs=specs)(states, inputs, shared)

        return spread if self.is_spread else one_by_one

    def together(
        self, function: Callable[[Tree, Tree], tuple[Tree, Tree]], like: tuple[Tree, Tree]
    ) -> Callable[[Tree, Tree], tuple[Tree, Tree]]:
        """Return `function` on what each device holds, with the axis `axis` of workers.

        Args:
            function: (arrays of a worker, shared arrays) -> (arrays of a worker, shared arrays).
            like: Arrays laid out as the results: those of all workers, [R ...], and shared ones.

        Returns:
            A function of (arrays of all workers, shared arrays).
        """
        if not self.is_spread:
            mapped = jax.vmap(function, in_axes=(0, None), axis_name=self.axis)

            def local(states: Tree, shared: Tree) -> tuple[Tree, Tree]:
                states, result = mapped(states, shared)
                return states, jax.tree.map(lambda x: x[0], result)

        else:

            def local(states: Tree, shared: Tree) -> tuple[Tree, Tree]:
                states, result = function(jax.tree.map(lambda x: jnp.squeeze(x, 0), states), shared)
                return jax.tree.map(lambda x: x[None], states), result

        def run(states: Tree, shared: Tree) -> tuple[Tree, Tree]:
            if surroundings() != "explicit":
                return local(states, shared)
            specs = jax.tree.map(_spec, ((states, shared), like))
            # Not checked: what collectives made equal on all workers is equal by construction.
            mapped = jax.shard_map(local, in_specs=specs[0], out_specs=specs[1], check_vma=False)
            return mapped(states, shared)

        return run


def _spec(x: Array) -> PartitionSpec:
    return jax.typeof(x).sharding.spec
