# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""One step of every worker, and what they exchange around it.

Without delay, fragments are exchanged and merged after the step. With delay they are sent and
merged before it: a message is made of the parameters that enter the step, and what arrives is
merged before a later one, so that no step waits for a message that is under way.

A step without exchange has no collective between workers.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxmoe.data.batch import Batch
from jaxmoe.replicas.fragments import Fragment
from jaxmoe.replicas.method import Talk, mask_foreign, merge, send
from jaxmoe.training.state import TrainState
from jaxmoe.training.step import CheckedStep, StepMetrics, TrainStep
from jaxmoe.training.workers.state import WorkerStates, WorkerTraining, flat, nested


def make_worker_step(step: TrainStep, training: WorkerTraining) -> Any:
    """Return the jitted step of all workers; it donates its state.

    Args:
        step: Step of one worker.
        training: Method.

    Returns:
        (state, batch) -> (state, metrics). Metrics of workers have a leading [R].
    """
    inner = replace(
        step,
        execution=replace(step.execution, mesh=replace(step.execution.mesh, replica=1)),
    )
    has_delay = training.method.timing.delay > 0

    def run(state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        if has_delay:
            state = exchange_late(training, state)
        state, metrics = local_steps(inner, training, state, batch)
        if not has_delay:
            state = exchange_now(training, state)
        local = state.local
        metrics = replace(
            metrics,
            skipped_in_a_row=state.skipped_in_a_row,
            exchange={"spread": local.spread, "outer_norm": local.outer_norm},
        )
        return state, metrics

    return CheckedStep(jax.jit(run, donate_argnums=0), step.model.vocab_size)


def local_steps(
    step: TrainStep, training: WorkerTraining, state: TrainState, batch: Batch
) -> tuple[TrainState, StepMetrics]:
    """Return the state after each worker's own step, and their metrics, [R ...].

    Args:
        step: Step of one worker.
        training: Method.
        state: State before it.
        batch: Rows of all workers.
    """
    local: WorkerStates = state.local
    fields = ("params", "opt_state", "router_state", "skipped", "skipped_in_a_row", "recent_norms")
    own = {name: getattr(local, name) for name in fields}
    shared = {"step": state.step, "key": jax.random.key_data(state.rng)}

    def one(number: Int[Array, ""], own: Any, rows: Batch, shared: Any) -> tuple[Any, Any]:
        rng = jax.random.wrap_key_data(shared["key"])
        before = TrainState(step=shared["step"], rng=rng, **own)
        first = number * rows.tokens.shape[0]
        if training.method.trains is None:
            after, metrics, _ = step(before, rows, first)
        else:
            after, metrics = _step_of_own(step, training, number, before, rows, first)
        return {name: getattr(after, name) for name in fields}, metrics

    rows = training.workers.rows(jax.tree.map(jnp.asarray, batch))
    own, metrics = training.workers.each(one)(own, rows, shared)
    return replace(state, step=state.step + 1, local=replace(local, **own)), metrics


def _step_of_own(
    step: TrainStep,
    training: WorkerTraining,
    number: Int[Array, ""],
    state: TrainState,
    rows: Batch,
    first: Any,
) -> tuple[TrainState, StepMetrics]:
    """Return the state after a step that leaves the parameters of other workers as they are."""

    def own(tree: Any, otherwise: Any) -> Any:
        arrays, others = flat(tree), flat(otherwise)
        trained = {path: arrays[path] for path in training.leaves}
        masked = mask_foreign(training.method, training.leaves, number, trained, others)
        return nested(arrays | masked)

    weight, summed, losses = step.gradients(state, rows, first)
    grads = own(summed.grads, jax.tree.map(jnp.zeros_like, summed.grads))
    after, metrics, _ = step.finish(state, weight, replace(summed, grads=grads), losses)
    return replace(after, params=own(after.params, state.params)), metrics


def exchange_now(training: WorkerTraining, state: TrainState) -> TrainState:
    """Return the state after a step with the fragments exchanged and merged that are due."""
    for fragment in training.fragments:

        def both(state: TrainState, fragment: Fragment = fragment) -> TrainState:
            pseudo, state = _send(training, fragment, state)
            return _merge(training, fragment, state, pseudo)

        is_due = training.method.timing.sends(fragment.number, state.step)
        state = jax.lax.cond(is_due, both, lambda state: state, state)
    return state


def exchange_late(training: WorkerTraining, state: TrainState) -> TrainState:
    """Return the state before a step with the fragments sent and merged that are due."""
    timing, before = training.method.timing, state
    for fragment in training.fragments:
        number = fragment.number
        waiting = before.local.talks[number]

        def sending(state: TrainState, fragment: Fragment = fragment) -> tuple[Any, TrainState]:
            return _send(training, fragment, state)

        def silent(state: TrainState, waiting: Talk = waiting) -> tuple[Any, TrainState]:
            return waiting.arrived, state

        # A message is made of what enters the step, not of what is merged beside it.
        arrived, sent = jax.lax.cond(timing.sends(number, before.step), sending, silent, before)
        talk, after = sent.local.talks[number], sent.local
        state = _with_talk(state, number, talk, spread=after.spread, outer_norm=after.outer_norm)
        state = jax.lax.cond(
            timing.merges(number, before.step),
            partial(_merge_arrived, training, fragment),
            lambda state: state,
            state,
        )
        talk = replace(state.local.talks[number], arrived=arrived)
        state = _with_talk(state, number, talk)
    return state


def _merge_arrived(training: WorkerTraining, fragment: Fragment, state: TrainState) -> TrainState:
    arrived = state.local.talks[fragment.number].arrived
    return _merge(training, fragment, state, arrived)


def _send(
    training: WorkerTraining, fragment: Fragment, state: TrainState
) -> tuple[dict[str, Array], TrainState]:
    """Return the pseudo-gradient of a fragment, and the state after the exchange."""
    method, local, number = training.method, state.local, fragment.number
    slow = fragment.take(flat(state.params)) if method.is_shared else None
    params = fragment.take(flat(local.params), leading=1)
    pseudo, talk = send(
        method,
        training.leaves,
        local.talks[number],
        params,
        slow,
        training.workers,
        number=method.timing.round(number, state.step),
        key=jax.random.fold_in(jax.random.fold_in(state.rng, state.step), number),
    )
    state = _with_talk(state, number, talk, **_measure(training, talk, params, slow, pseudo))
    return pseudo, replace(
        state, skipped=jnp.sum(local.skipped), skipped_in_a_row=jnp.min(local.skipped_in_a_row)
    )


def _merge(
    training: WorkerTraining, fragment: Fragment, state: TrainState, pseudo: dict[str, Array]
) -> TrainState:
    """Return the state with a pseudo-gradient merged."""
    method, local, number = training.method, state.local, fragment.number
    slow = fragment.take(flat(state.params)) if method.is_shared else None
    mine = flat(local.params)
    own, slow, outer, talk = merge(
        method,
        local.talks[number],
        pseudo,
        fragment.take(mine, leading=1),
        slow,
        state.opt_state[number] if method.is_shared else None,
        training.workers,
        number=method.timing.round(number, state.step - method.timing.delay),
    )
    state = _with_talk(state, number, talk)
    state = replace(
        state, local=replace(state.local, params=nested(fragment.put(mine, own, leading=1)))
    )
    if slow is None:
        return state
    outers = tuple(outer if i == number else o for i, o in enumerate(state.opt_state))
    params = nested(fragment.put(flat(state.params), slow))
    return replace(state, params=params, opt_state=outers)


def _measure(
    training: WorkerTraining, talk: Talk, params: Any, slow: Any, pseudo: Any
) -> dict[str, Array]:
    """Return how far the messages lie apart, and the norm of the pseudo-gradient, [R]."""
    anchor = training.workers.stack(slow) if talk.slow is None else talk.slow
    wide = training.workers.stack(pseudo) if talk.slow is None else pseudo
    if training.method.anchor == "merged":
        wide = jax.tree.map(jnp.subtract, anchor, wide)
    apart = jax.tree.map(lambda a, x, p: (a - x) - p, anchor, params, wide)
    norm, distance = _norms(wide), _norms(apart)
    return {"outer_norm": norm, "spread": distance / jnp.maximum(norm, 1e-30)}


def _norms(tree: Any) -> Array:
    """Return the global norm of the arrays of each worker, [R]."""
    squares = [
        jnp.sum(jnp.square(x.astype(jnp.float32)), axis=tuple(range(1, x.ndim)))
        for x in jax.tree.leaves(tree)
    ]
    return jnp.sqrt(sum(squares[1:], squares[0]))


def _with_talk(state: TrainState, number: int, talk: Talk, **fields: Array) -> TrainState:
    talks = tuple(talk if i == number else t for i, t in enumerate(state.local.talks))
    return replace(state, local=replace(state.local, talks=talks, **fields))
