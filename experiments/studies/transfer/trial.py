# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Trains one cell of `transfer` at one rate with one seed.

    one program per shape: rate, schedule, seed and data are its arguments

A program is a scan over several steps, so that a step of a small model does not wait for Python.
Between two calls a signal is checked and a diverged trial ends. The factors of the schedule are an
array: the number of steps is not part of the program, and a budget may set it after timing.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from experiments.studies.data import check_vocabulary, digest_of, held_out_batches, loader_of
from experiments.studies.programs import StudyPrograms
from experiments.studies.study import check_stop
from experiments.studies.transfer.config import Cell, TransferConfig
from experiments.studies.trials import Record, finite, has_diverged, on_device
from jaxmoe.data import Batch, Source
from jaxmoe.execution import ExecutionConfig
from jaxmoe.resilience.stop import StopRequest
from jaxmoe.run.config import TrainingConfig
from jaxmoe.training.evaluate import evaluate
from jaxmoe.training.state import TrainState

EXECUTION = ExecutionConfig(unroll=4)
MOST_PIECE = 16
"""Largest number of steps in one call of the program."""
_FEWEST_FACTORS = 2**14
_TIMED = 3
_LAST = 0.1
"""Share of the steps, at the end, over which the load is averaged."""


class SweepData:
    """Training and held-out batches, the same for every arm and point.

    Args:
        config: Config of the sweep.

    Raises:
        ValueError: The vocabulary is too large, or there is too little data.
    """

    def __init__(self, config: TransferConfig):
        training = config.training
        model = config.model
        self.source: Source = config.data.build(training.seed)
        check_vocabulary(
            self.source, model, num_masks=model.vocab_size - training.objective.num_predicted(model)
        )
        self.held_out = held_out_batches(self.source, training, config.evaluation_batches)
        self.digest = digest_of([self.source])

    @property
    def unit(self) -> str:
        """Unit of the held-out loss."""
        return "bits per token" if self.source.bytes_per_token is None else "bits per byte"

    @property
    def tokens_per_unit(self) -> float:
        """Tokens per byte of text; 1 where a token has no bytes."""
        return 1.0 / (self.source.bytes_per_token or 1.0)

    @functools.lru_cache(maxsize=8)  # noqa: B019 (one object per process)
    def pieces(self, training: TrainingConfig, piece: int) -> tuple[Batch, ...]:
        """Return all batches of a training in order, `piece` of them stacked at a time."""
        loader = loader_of(self.source, training, training.seed)
        return tuple(
            on_device(
                jax.tree.map(
                    lambda *rows: np.stack(rows), *map(loader.batch, range(first, first + piece))
                )
            )
            for first in range(0, training.steps, piece)
        )


def piece_of(steps: int) -> int:
    """Return the steps of one call: the largest divisor that is not too large."""
    return next(size for size in range(min(steps, MOST_PIECE), 0, -1) if steps % size == 0)


class SweepPrograms(StudyPrograms):
    """Compiled programs of one cell, and of every other cell of the same shape.

    Args:
        cell: One of the cells.
        batch: A held-out batch.
    """

    def __init__(self, cell: Cell, batch: Batch):
        plan = cell.plan
        self._table = plan.table
        self._config = cell.config.optimizer
        super().__init__(
            plan.model,
            plan.optimizer,
            batch,
            training=cell.config.training,
            objective=cell.config.training.objective,
            execution=EXECUTION,
            parameterization=plan.parameterization,
        )
        self._piece: Any = None

    def train_piece(
        self, state: TrainState, rate: Array, factors: Array, batches: Batch
    ) -> tuple[TrainState, Any]:
        """Take several steps; donates the state.

        Args:
            state: State before the steps.
            rate: Peak learning rate.
            factors: Factors of the schedule by step, from step 0.
            batches: Batches, stacked.

        Returns:
            The state after the steps; loss, steps refused in a row, and max violation of each step.
        """
        arguments = (state, rate, factors, batches)
        if self._piece is None:
            self._piece = self.compile(jax.jit(self._train, donate_argnums=0), *arguments)
        return self._piece(*arguments)

    def _train(self, state: TrainState, rate: Array, factors: Array, batches: Batch) -> Any:
        optimizer = self._config.build(
            self._table, lambda count: jnp.take(factors, count), learning_rate=rate
        )
        step = self.step_with(optimizer)

        def one(state: TrainState, batch: Batch) -> Any:
            state, metrics = step(state, batch)
            violation = metrics.router.get("max_violation", jnp.float32(jnp.nan))
            return state, (metrics.loss, metrics.skipped_in_a_row, violation)

        return jax.lax.scan(one, state, batches)


def program_key(cell: Cell) -> Any:
    """Return a key that is equal for cells that share their programs."""
    training = cell.config.training
    shape = (training.batch_size, training.sequence_length, piece_of(training.steps))
    settings = (
        training.accumulation,
        training.accumulated_balance,
        training.clip,
        training.objective,
    )
    return cell.plan.model, cell.plan.table, cell.rule, shape, settings


def schedule_factors(cell: Cell) -> Array:
    """Return the factor of every step, padded so that programs are shared."""
    steps = cell.config.training.steps
    room = _FEWEST_FACTORS
    while room < steps:
        room *= 2
    factors = jax.vmap(cell.plan.schedule)(jnp.arange(steps, dtype=jnp.int32))
    return jnp.zeros(room, jnp.float32).at[:steps].set(factors)


def train(
    programs: SweepPrograms, cell: Cell, rate: float, seed: int, data: SweepData, stop: StopRequest
) -> Record:
    """Run one trial.

    Args:
        programs: Programs of the cell.
        cell: Cell to train.
        rate: Learning rate.
        seed: Seed of the initial values and of the order of the data.
        data: Data of the sweep.
        stop: Checked between calls of the program.

    Returns:
        The record, as JSON.

    Raises:
        StoppedError: A signal arrived.
    """
    started = time.perf_counter()
    training = cell.with_seed(seed)
    state = programs.init(jax.random.key(seed))
    factors = schedule_factors(cell)
    measured = []
    is_diverged = False
    for batches in data.pieces(training, piece_of(training.steps)):
        check_stop(stop)
        state, metrics = programs.train_piece(state, jnp.float32(rate), factors, batches)
        measured.append(jax.device_get(metrics))
        is_diverged = has_diverged(measured[-1][1], training)
        if is_diverged:
            break
    loss, _, violation = (np.concatenate(part) for part in zip(*measured, strict=True))
    bits = math.nan
    if not is_diverged:
        evaluation = evaluate(programs.evaluate, state.params, state.router_state, data.held_out)
        bits = evaluation.bits_per_token * data.tokens_per_unit
    last = max(1, round(_LAST * training.steps))
    return {
        "arm": cell.arm,
        "value": cell.value,
        "rate": rate,
        "seed": seed,
        "cell": cell.digest,
        "data": data.digest,
        "status": "done" if math.isfinite(bits) else "diverged",
        "bits": finite(bits),
        "loss": finite(loss[-last:].mean()),
        "max_violation": finite(violation[-last:].mean()),
        "skipped": int(state.skipped),
        "steps": len(loss),
        "seconds": time.perf_counter() - started,
    }


def seconds_of(programs: SweepPrograms, cell: Cell, data: SweepData) -> tuple[float, float]:
    """Return the seconds of a step and of an evaluation, after warm-up.

    Args:
        programs: Programs of the cell.
        cell: Cell to time.
        data: Data of the sweep.
    """
    training = cell.with_seed(cell.config.training.seed)
    piece = piece_of(training.steps)
    (batches,) = data.pieces(dataclasses.replace(training, steps=piece), piece)
    state = programs.init(jax.random.key(0))
    factors = schedule_factors(cell)
    # The cell's own rate: at 0 an independent weight decay would be infinite and every step
    # refused.
    rate = jnp.float32(cell.config.optimizer.learning_rate)
    steps = []
    evaluations = []
    for _ in range(_TIMED):
        started = time.perf_counter()
        state, _ = programs.train_piece(state, rate, factors, batches)
        jax.block_until_ready(state.params)
        steps.append(time.perf_counter() - started)
        started = time.perf_counter()
        evaluate(programs.evaluate, state.params, state.router_state, data.held_out[:1])
        evaluations.append(time.perf_counter() - started)
    return min(steps[1:]) / piece, min(evaluations[1:]) * len(data.held_out)
