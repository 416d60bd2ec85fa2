# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""One step of every worker, and what they exchange around it.

Without delay, fragments are exchanged and merged after the step. With delay they are sent and
merged before it: a message is made of the parameters that enter the step, and what arrives is
merged before a later one, so that no product of a step needs a message that is under way. With
delay the steps that send a fragment are programs of their own: see `programs.py`. After the last
step of a run all fragments are exchanged and merged, whatever their turn and delay.

A step without exchange runs no collective between workers.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.contrib.slow_links.fragments import Fragment, flat, nest
from jaxmoe.contrib.slow_links.method import Talk, mask_foreign, merge, send
from jaxmoe.contrib.slow_links.workers.local import local_of, with_local
from jaxmoe.contrib.slow_links.workers.programs import ScheduledStep
from jaxmoe.contrib.slow_links.workers.routers import remember_statistics, replay, total_of
from jaxmoe.contrib.slow_links.workers.state import Arrived, WorkerStates, WorkerTraining
from jaxmoe.data.batch import Batch
from jaxmoe.training.estimators.base import StepGradients
from jaxmoe.training.parts.base import StepPart
from jaxmoe.training.state import TrainState
from jaxmoe.training.step import CheckedStep, Step, StepMetrics


def make_worker_step(training: WorkerTraining, *, exchanges: bool = True) -> CheckedStep:
    """Return the jitted step of all workers; it donates its state.

    Args:
        training: Method and the step of one worker.
        exchanges: Whether the step exchanges and merges; False where that leaves the program.

    Returns:
        (state, batch) -> (state, metrics). Metrics of workers have a leading [R].
    """
    step = training.step
    timing = training.method.timing
    has_delay = timing.delay > 0
    assert step is not None  # only tests without a model have none

    def run(
        state: TrainState, batch: Batch, sent: Collection[int] = ()
    ) -> tuple[TrainState, StepMetrics]:
        if has_delay and exchanges:
            state = exchange_late(training, state, sent)
        state, metrics = local_steps(step, training, state, batch)
        if exchanges:
            state = exchange_now(training, state)
        measured = {"spread": local_of(state).spread, "outer_norm": local_of(state).outer_norm}
        in_a_row = state.skipped_in_a_row if exchanges else metrics.skipped_in_a_row[0]
        metrics = replace(metrics, skipped_in_a_row=in_a_row, exchange=measured)
        return state, metrics

    jitted: Any = jax.jit(run, donate_argnums=0, static_argnums=2)
    if has_delay and exchanges:
        jitted = ScheduledStep(jitted, timing.sent, timing.turns)
    return CheckedStep(jitted, step.model.vocab_size)


def local_steps(
    step: Step, training: WorkerTraining, state: TrainState, batch: Batch
) -> tuple[TrainState, StepMetrics]:
    """Return the state after each worker's own step, and their metrics, [R ...].

    Args:
        step: Step of one worker.
        training: Method.
        state: State before it.
        batch: Rows of all workers.
    """
    local: WorkerStates = local_of(state)
    fields = ("params", "opt_state", "router_state", "skipped", "skipped_in_a_row", "recent_norms")
    worker_state = {name: getattr(local, name) for name in fields}
    shared = {"step": state.step, "key": jax.random.key_data(state.rng)}

    def one(number: Int[Array, ""], worker_state: Any, rows: Batch, shared: Any) -> tuple[Any, Any]:
        rng = jax.random.wrap_key_data(shared["key"])
        before = TrainState(step=shared["step"], rng=rng, **worker_state)
        first = (training.first_worker + number) * rows.tokens.shape[0]
        one_step = step if training.method.owned is None else own_step(step, training, number)
        after, metrics, statistics = one_step(before, rows, first)
        results = (metrics, None if local.past is None else statistics)
        return {name: getattr(after, name) for name in fields}, results

    rows = training.workers.rows(jax.tree.map(jnp.asarray, batch))
    worker_state, (metrics, statistics) = training.workers.each(one)(worker_state, rows, shared)
    number = state.step + 1
    past = local.past
    if past is not None:
        past = remember_statistics(past, statistics, number, metrics.is_skipped)
    talks = count_step(training, local.talks, metrics.num_tokens, metrics.is_skipped)
    local = replace(local, past=past, talks=talks, **worker_state)
    return with_local(replace(state, step=number), local), metrics


def count_step(
    training: WorkerTraining,
    talks: tuple[Talk, ...],
    tokens: Float[Array, " R"],
    is_skipped: Bool[Array, " R"],
) -> tuple[Talk, ...]:
    """Return the states of the exchanges with one more step in the weights of the workers.

    Args:
        training: Method.
        talks: State of the exchanges of each fragment.
        tokens: Sum of the loss weights of each worker.
        is_skipped: Whether the guard of each worker refused the step.
    """
    weighting = training.method.weighting
    if weighting is None:
        return talks
    return tuple(
        replace(talk, weighting=weighting.add(talk.weighting, tokens, is_skipped)) for talk in talks
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ForeignRows(StepPart):
    """Leaves parameters as they are that other workers train, without moments."""

    name: ClassVar[str] = "foreign_rows"

    training: WorkerTraining
    number: Int[Array, ""]
    """Number of the worker that takes the step."""

    def update(
        self, step: Step, state: TrainState, batch: Batch, gradients: StepGradients
    ) -> StepGradients:
        """Return the gradients with zeros in the rows of other workers."""
        del step, state, batch
        summed = gradients.summed
        grads = self._keep_own(summed.grads, jax.tree.map(jnp.zeros_like, summed.grads))
        return gradients._replace(summed=replace(summed, grads=grads))

    def settle(self, step: Step, before: TrainState, after: TrainState) -> TrainState:
        """Return the training state with the rows of other workers as they were."""
        del step
        return replace(after, params=self._keep_own(after.params, before.params))

    def _keep_own(self, tree: Any, otherwise: Any) -> Any:
        arrays = flat(tree)
        other_arrays = flat(otherwise)
        training = self.training
        trained = {path: arrays[path] for path in training.leaves}
        masked = mask_foreign(training.method, training.leaves, self.number, trained, other_arrays)
        return nest(arrays | masked)


def own_step(step: Step, training: WorkerTraining, number: Int[Array, ""]) -> Step:
    """Return a step that leaves parameters as they are that other workers train.

    Args:
        step: Step of one worker.
        training: Method.
        number: Number of the worker.
    """
    if (own_rows := training.own_rows) is not None:
        step = replace(step, optimizer=own_rows.of(number))
    return replace(step, parts=(*step.parts, ForeignRows(training=training, number=number)))


def exchange_now(training: WorkerTraining, state: TrainState) -> TrainState:
    """Return the state after a step with the fragments exchanged and merged that are due.

    With delay that is none before the last step.
    """
    timing = training.method.timing
    if timing.delay:
        if timing.last is None:
            return state
        last = partial(_exchange_last, training)
        return jax.lax.cond(timing.ends(state.step), last, lambda state: state, state)
    for fragment in training.fragments:

        def both(state: TrainState, fragment: Fragment = fragment) -> TrainState:
            arrived, state = _send(training, fragment, state)
            return merge_arrived(training, fragment, arrived, state)

        is_due = timing.sends(fragment.number, state.step) | timing.ends(state.step)
        state = jax.lax.cond(is_due, both, lambda state: state, state)
    return state


def _exchange_last(training: WorkerTraining, state: TrainState) -> TrainState:
    """Return the state after the last step with what is under way merged, and then all else."""
    for fragment in training.fragments:
        number = fragment.number
        if training.method.timing.is_under_way(number):
            waiting = local_of(state).arrived[number]
            state = merge_arrived(training, fragment, waiting, state)
            # A longer run that goes on from here does not merge it again.
            merged = replace(waiting, last=jnp.zeros_like(waiting.last))
            news = tuple(
                merged if i == number else a for i, a in enumerate(local_of(state).arrived)
            )
            state = with_local(state, replace(local_of(state), arrived=news))
        arrived, state = _send(training, fragment, state)
        state = merge_arrived(training, fragment, arrived, state)
    return state


def exchange_late(training: WorkerTraining, state: TrainState, sent: Collection[int]) -> TrainState:
    """Return the state before a step with the fragments sent and merged that are due.

    Args:
        training: Method.
        state: State before the step.
        sent: Numbers of the fragments that are sent, without a conditional: nothing keeps the
            compiler from running their collectives beside the products of the step.
    """
    timing = training.method.timing
    before = state
    for fragment in training.fragments:
        number = fragment.number
        waiting = arrived = local_of(before).arrived[number]
        if number in sent:
            # A message is made of what enters the step, not of what is merged beside it.
            arrived, after = _send(training, fragment, before, is_beside=True)
            state = _with_exchange(state, number, after)
        state = jax.lax.cond(
            timing.merges(number, before.step) & (waiting.last == before.step - timing.delay),
            partial(merge_arrived, training, fragment, waiting),
            lambda state: state,
            state,
        )
        news = tuple(arrived if i == number else a for i, a in enumerate(local_of(state).arrived))
        state = with_local(state, replace(local_of(state), arrived=news))
    return state


def _with_exchange(state: TrainState, number: int, after: TrainState) -> TrainState:
    """Return a state with what an exchange of a fragment has changed beside what it brings."""
    state = replace(
        _with_talk(state, number, local_of(after).talks[number]),
        skipped=after.skipped,
        skipped_in_a_row=after.skipped_in_a_row,
    )
    local = replace(
        local_of(state), spread=local_of(after).spread, outer_norm=local_of(after).outer_norm
    )
    if not number:
        local = replace(local, past=local_of(after).past)
    return with_local(state, local)


def _send(
    training: WorkerTraining, fragment: Fragment, state: TrainState, is_beside: bool = False
) -> tuple[Arrived, TrainState]:
    """Return what an exchange of a fragment brings, and the state after it."""
    method = training.method
    local = local_of(state)
    number = fragment.number
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
        is_beside=is_beside,
    )
    total = None
    past = local.past
    if past is not None and not number:
        total = total_of(past, state.step)
        past = jax.tree.map(jnp.zeros_like, past)
    state = replace(
        _with_talk(state, number, talk),
        skipped=jnp.sum(local.skipped),
        skipped_in_a_row=jnp.min(local.skipped_in_a_row),
    )
    measured = _measure(training, talk, params, slow, pseudo)
    state = with_local(state, replace(local_of(state), past=past, **measured))
    return Arrived(pseudo=pseudo, total=total, last=state.step), state


def merge_arrived(
    training: WorkerTraining, fragment: Fragment, arrived: Arrived, state: TrainState
) -> TrainState:
    """Return the state with what an exchange has brought."""
    method = training.method
    local = local_of(state)
    number = fragment.number
    slow = fragment.take(flat(state.params)) if method.is_shared else None
    mine = flat(local.params)
    local_params, slow, outer, talk = merge(
        method,
        local.talks[number],
        arrived.pseudo,
        fragment.take(mine, leading=1),
        slow,
        state.opt_state[number] if method.is_shared else None,
        training.workers,
        number=method.timing.round(number, arrived.last),
    )
    state = _with_talk(state, number, talk)
    local = replace(local_of(state), params=nest(fragment.put(mine, local_params, leading=1)))
    if arrived.total is not None and training.step is not None:
        routers = replay(training.step.model, state, arrived.total, arrived.last)
        local = replace(local, router_state=training.workers.stack(routers))
        state = replace(state, router_state=routers)
    if slow is not None:
        outers = tuple(outer if i == number else o for i, o in enumerate(state.opt_state))
        params = nest(fragment.put(flat(state.params), slow))
        state = replace(state, params=params, opt_state=outers)
    return with_local(state, local)


def _measure(
    training: WorkerTraining, talk: Talk, params: Any, slow: Any, pseudo: Any
) -> dict[str, Array]:
    """Return how far the messages lie apart, and the norm of the pseudo-gradient, [R]."""
    anchor = training.workers.stack(slow) if talk.slow is None else talk.slow
    wide = training.workers.stack(pseudo) if talk.slow is None else pseudo
    if training.method.anchor == "merged":
        wide = jax.tree.map(jnp.subtract, anchor, wide)
    apart = jax.tree.map(lambda a, x, p: (a - x) - p, anchor, params, wide)
    norm = _norms(wide)
    distance = _norms(apart)
    return {"outer_norm": norm, "spread": distance / jnp.maximum(norm, 1e-30)}


def _norms(tree: Any) -> Array:
    """Return the global norm of the arrays of each worker, [R]."""
    squares = [
        jnp.sum(jnp.square(x.astype(jnp.float32)), axis=tuple(range(1, x.ndim)))
        for x in jax.tree.leaves(tree)
    ]
    return jnp.sqrt(sum(squares[1:], squares[0]))


def _with_talk(state: TrainState, number: int, talk: Talk) -> TrainState:
    talks = tuple(talk if i == number else t for i, t in enumerate(local_of(state).talks))
    return with_local(state, replace(local_of(state), talks=talks))
