# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""State of the workers beside the parameters that the world sees.

`TrainState.params` are the slow parameters, `TrainState.opt_state` the state of the outer
optimiser, `TrainState.router_state` that of the last exchange. `TrainState.local` has the rest.
"""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct, traverse_util
from jaxtyping import Array, Float, Int

from jaxmoe.execution import ExecutionConfig
from jaxmoe.parameters import ParameterTable
from jaxmoe.replicas.base import ReplicasBase
from jaxmoe.replicas.fragments import Fragment, Leaf
from jaxmoe.replicas.method import Method, Talk, begin, begin_outer
from jaxmoe.training.state import TrainState
from jaxmoe.training.workers.places import trained_leaves, workers_of
from jaxmoe.training.workers.routers import Past
from sharding.workers import Workers


@typing.no_type_check
@struct.dataclass
class WorkerStates:
    """States of the workers, [R ...], and of their exchanges."""

    params: Any
    opt_state: Any
    router_state: Any
    skipped: Int[Array, " R"]
    """Steps that the guard of each worker refused."""
    skipped_in_a_row: Int[Array, " R"]
    recent_norms: Float[Array, "R window"] | None
    talks: tuple[Talk, ...]
    """State of the exchanges of each fragment."""
    past: Past | None
    """Routing statistics since the last exchange; None for routers without state."""
    spread: Float[Array, " R"]
    """Distance of each worker's message from the pseudo-gradient at the last exchange, over the
    norm of the latter."""
    outer_norm: Float[Array, " R"]
    """Norm of the last pseudo-gradient."""


def flat(tree: Any) -> dict[str, Any]:
    """Return parameters as {path: array}."""
    return traverse_util.flatten_dict(tree, sep="/")


def nested(arrays: dict[str, Any]) -> Any:
    """Return {path: array} as nested parameters."""
    return traverse_util.unflatten_dict(arrays, sep="/")


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerTraining:
    """A method of low-communication training for one model on one mesh."""

    method: Method
    workers: Workers
    leaves: dict[str, Leaf]
    """{path: what is known of a parameter}."""
    fragments: tuple[Fragment, ...]

    @classmethod
    def of(
        cls, config: ReplicasBase, table: ParameterTable, execution: ExecutionConfig
    ) -> WorkerTraining:
        """Return the method of a config.

        Args:
            config: Method.
            table: Parameters.
            execution: Execution with every size of the mesh filled in.

        Raises:
            ValueError: The mesh has places for another number of workers, or the layout of the
                state spans workers.
        """
        workers, leaves = workers_of(config, execution), trained_leaves(table)
        method = config.build(leaves)
        return cls(
            method=method,
            workers=workers,
            leaves={leaf.path: leaf for leaf in leaves},
            fragments=method.fragments(leaves),
        )

    def begin(self, state: TrainState) -> TrainState:
        """Return the state of a run without workers as that of equal workers.

        Args:
            state: State with the parameters and the state of the inner optimiser.
        """
        stack, method = self.workers.stack, self.method
        params = flat(state.params)
        talks = tuple(
            begin(method, self.leaves, fragment.take(params), self.workers)
            for fragment in self.fragments
        )
        zeros = stack(jnp.zeros(()))
        local = WorkerStates(
            params=stack(state.params),
            opt_state=stack(state.opt_state),
            router_state=stack(state.router_state),
            skipped=stack(state.skipped),
            skipped_in_a_row=stack(state.skipped_in_a_row),
            recent_norms=stack(state.recent_norms),
            talks=talks,
            past=None,
            spread=zeros,
            outer_norm=zeros,
        )
        outer: Any = ()
        if method.is_shared:
            outer = tuple(begin_outer(method, part.take(params)) for part in self.fragments)
        return replace(state, opt_state=outer, recent_norms=None, local=local)

    def mean(self, states: WorkerStates) -> Any:
        """Return the mean of the workers' parameters, as the world sees methods without a copy."""
        return jax.tree.map(lambda x: jnp.mean(x, axis=0), states.params)
