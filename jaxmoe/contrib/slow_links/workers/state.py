# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""State of the workers beside the parameters that the world sees.

`TrainState.params` are the slow parameters, `TrainState.opt_state` the state of the outer
optimiser, `TrainState.router_state` that of the last exchange. The rest is in
`TrainState.parts["workers"]`.
"""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from jaxmoe.contrib.slow_links.fragments import Fragment, Leaf, TrainingFacts, flat
from jaxmoe.contrib.slow_links.method import Method, Talk, begin, begin_outer
from jaxmoe.contrib.slow_links.workers.arrays import Workers
from jaxmoe.contrib.slow_links.workers.local import local_of, with_local
from jaxmoe.contrib.slow_links.workers.own_rows import OwnRows
from jaxmoe.contrib.slow_links.workers.places import alone, trained_leaves, workers_of
from jaxmoe.contrib.slow_links.workers.routers import Past, Total, begin_past, total_of
from jaxmoe.parameters import ParameterTable
from jaxmoe.training.state import TrainState
from jaxmoe.training.step import Step

if TYPE_CHECKING:
    from jaxmoe.contrib.slow_links.base import ReplicasBase


@typing.no_type_check
@struct.dataclass
class Arrived:
    """What an exchange of a fragment brings."""

    pseudo: Any
    """{path: pseudo-gradient}."""
    total: Total | None
    """Routing statistics since the last exchange, with the first fragment; None otherwise."""
    last: Int[Array, ""]
    """Step after which it was sent."""


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
    arrived: tuple[Arrived, ...] | None
    """What waits to be merged, by fragment; None without delay."""
    past: Past | None
    """Routing statistics since the last exchange, before it zeros; None for routers without state,
    and where workers never become equal."""
    spread: Float[Array, " R"]
    """Distance of each worker's message from the pseudo-gradient at the last exchange, over the
    norm of the latter."""
    outer_norm: Float[Array, " R"]
    """Norm of the last pseudo-gradient."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerTraining:
    """A method of low-communication training for one model on one mesh."""

    method: Method
    workers: Workers
    leaves: dict[str, Leaf]
    """{path: what is known of a parameter}."""
    fragments: tuple[Fragment, ...]
    step: Step | None = None
    """Step of a worker; None in tests without a model."""
    first_worker: int = 0
    """Number of the first worker of this job, in the order in which workers share a batch."""

    @classmethod
    def of(
        cls,
        config: ReplicasBase,
        table: ParameterTable,
        step: Step,
        steps: int,
        site: int | None = None,
    ) -> WorkerTraining:
        """Return the method of a config.

        Args:
            config: Method.
            table: Parameters.
            step: Step of one worker; every size of its mesh is filled in.
            site: Number of the one worker of this job; None if all workers are in it.
            steps: Steps of the run.

        Raises:
            ValueError: The mesh has places for another number of workers, or the layout of the
                state spans workers.
        """
        workers = workers_of(config, step.execution, site)
        leaves = trained_leaves(table)
        method = config.build(TrainingFacts(leaves, workers.number, steps)).until(steps)
        return cls(
            method=method,
            workers=workers,
            leaves={leaf.path: leaf for leaf in leaves},
            fragments=method.fragments(leaves),
            step=alone(step),
            first_worker=site or 0,
        )

    @property
    def own_rows(self) -> OwnRows | None:
        """Optimiser of which workers hold the state of their own rows; None if all train all."""
        if self.method.owned is None or self.step is None:
            return None
        return OwnRows(
            optimizer=self.step.optimizer, ownership=self.method.owned, leaves=self.leaves
        )

    def begin(self, state: TrainState) -> TrainState:
        """Return the state of a run without workers as that of equal workers.

        Args:
            state: State with the parameters and the state of the inner optimiser.
        """
        stack = self.workers.stack
        method = self.method
        params = flat(state.params)
        talks = tuple(
            begin(method, self.leaves, fragment.take(params), self.workers)
            for fragment in self.fragments
        )
        past = None
        step = self.step
        zeros = stack(jnp.zeros(()))
        if method.is_shared and step is not None:
            past = begin_past(step, state, method.timing.every, self.workers)
        arrived = None
        if method.timing.delay:
            arrived = tuple(self._nothing(fragment, params, past) for fragment in self.fragments)
        local = WorkerStates(
            params=stack(state.params),
            opt_state=(
                stack(state.opt_state)
                if self.own_rows is None
                else self.own_rows.begin(self.workers, state.params, state.opt_state)
            ),
            router_state=stack(state.router_state),
            skipped=stack(state.skipped),
            skipped_in_a_row=stack(state.skipped_in_a_row),
            recent_norms=stack(state.recent_norms),
            talks=talks,
            past=past,
            arrived=arrived,
            spread=zeros,
            outer_norm=zeros,
        )
        outer: Any = ()
        if method.is_shared:
            outer = tuple(begin_outer(method, part.take(params)) for part in self.fragments)
        return with_local(replace(state, opt_state=outer, recent_norms=None), local)

    def _nothing(self, fragment: Fragment, params: dict[str, Array], past: Past | None) -> Arrived:
        """Return what has arrived before the first exchange: zeros."""
        zeros = jax.tree.map(jnp.zeros_like, fragment.take(params))
        step = jnp.zeros((), jnp.int32)
        total = None if past is None or fragment.number else total_of(past, step)
        return Arrived(
            pseudo=zeros if self.method.is_shared else self.workers.stack(zeros),
            total=total,
            last=step,
        )

    def publish(self, state: TrainState) -> TrainState:
        """Return the state with what the world sees of workers that have no common copy: means.

        Args:
            state: State of a method whose slow parameters are not shared.
        """
        local = local_of(state)

        def mean(x: Array) -> Array:
            return jnp.mean(x, axis=0) if jnp.issubdtype(x.dtype, jnp.floating) else x[0]

        return replace(
            state,
            params=jax.tree.map(mean, local.params),
            router_state=jax.tree.map(mean, local.router_state),
            skipped=jnp.sum(local.skipped),
            skipped_in_a_row=jnp.min(local.skipped_in_a_row),
        )
