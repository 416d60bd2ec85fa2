# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Runs one trial of `outer`: one method with all seeds.

    same language, same batches, same initial values, one compilation: the seed and the data are
    arguments of the compiled step

What is evaluated is what the world sees of a run: the slow parameters after the last exchange, or
the mean of the workers where they have none in common.

A trial that cannot finish is a record with a status and a reason, and the next one runs: `done`,
`diverged` (steps refused as not finite), `refused` (the method does not fit the study), `failed`.
"""

from __future__ import annotations

import functools
import time
from typing import Any

import jax
import numpy as np

from experiments.studies.data import loader_of
from experiments.studies.outer.config import (
    ALONE,
    OuterConfig,
    replicas_of,
    run_of,
)
from experiments.studies.outer.data import OuterTask, key_of
from experiments.studies.programs import RARE, ModelPrograms
from experiments.studies.study import check_stop
from experiments.studies.trials import TRIAL_ERRORS, Record, error_record, finite, has_diverged
from jaxmoe.configs import to_json
from jaxmoe.contrib.slow_links.run_part import sent_per_step, synchronous_bytes
from jaxmoe.data import Batch
from jaxmoe.resilience.stop import StopRequest
from jaxmoe.run.assemble import Assembly
from jaxmoe.run.plan import make_plan
from jaxmoe.training.evaluate import evaluate
from jaxmoe.training.metrics import StepMetrics, fetch_metrics
from jaxmoe.training.state import TrainState, state_around
from sharding.distributed import global_batch


class MethodPrograms(ModelPrograms):
    """Compiled programs of one method, shared by its seeds; used on the mesh of the task.

    Args:
        config: Config of the study.
        name: Row of the table.
        task: What all methods share.
    """

    def __init__(self, config: OuterConfig, name: str, task: OuterTask):
        run = run_of(config, name)
        plan = make_plan(run)
        training = run.training
        self._initial = task.params[0], key_of(config, 0)
        self.assembly = Assembly(
            plan=plan,
            execution=run.execution,
            mesh=task.mesh,
            source=task.source,
            loader=loader_of(task.source, training, training.seed),
        )
        super().__init__(
            plan.model,
            global_batch(rows_of_batch(task.training[0][0], training.batch_size), task.mesh),
            objective=training.objective,
            execution=run.execution,
        )

    @functools.cached_property
    def any_state(self) -> TrainState:
        """State from which programs take their shapes."""
        return self.begin(*self._initial)

    def make_step(self) -> Any:
        """Return the step of the run, not compiled yet."""
        return self.assembly.workers.jit_step(
            self.assembly.step(self.assembly.plan.config.training.accumulation)
        )

    @functools.cached_property
    def _around(self) -> Any:
        """Program from initial parameters and a key to the state before the first step."""
        plan = self.assembly.plan
        execution = self.assembly.execution

        def around(params: Any, key: Any) -> TrainState:
            return state_around(plan.model, plan.optimizer, execution, params, key)

        return self.compile(jax.jit(around), *self._initial, options=RARE)

    def begin(self, params: Any, key: Any) -> TrainState:
        """Return the state before the first step.

        Args:
            params: Initial parameters; they are copied.
            key: Key of the seed.
        """
        copied = jax.tree.map(lambda x: x.copy(), params)  # the step donates its state
        return self.assembly.workers.begin(self._around(copied, key))


def rows_of_batch(batch: Batch, number: int) -> Batch:
    """Return the first rows of a batch."""
    return jax.tree.map(lambda x: x[:number], batch)


def run_trial(config: OuterConfig, name: str, task: OuterTask, stop: StopRequest) -> Record:
    """Run one trial; return its record, as JSON.

    Args:
        config: Config of the study.
        name: Row of the table.
        task: What all methods share.
        stop: Checked at every step.

    Raises:
        StoppedError: A signal arrived.
    """
    started = time.perf_counter()
    record: Record = {"method": name, "status": "done", "reason": None}
    try:
        record["replicas"] = replicas_json(config, name)
        with jax.set_mesh(task.mesh):
            _fill(record, config, name, task, stop)
    except TRIAL_ERRORS as error:
        record |= error_record(name, error)
    return record | {"seconds": time.perf_counter() - started}


def replicas_json(config: OuterConfig, name: str) -> Any:
    """Return the definition of a method; a record with another one is outdated."""
    return to_json(replicas_of(config, name))


def _fill(
    record: Record, config: OuterConfig, name: str, task: OuterTask, stop: StopRequest
) -> None:
    """Fill the record: bytes, and training and evaluation of every seed."""
    programs = MethodPrograms(config, name, task)
    training = programs.assembly.plan.config.training
    record["bytes"] = _bytes(programs.assembly, name, config.workers)
    record["tokens"] = training.tokens
    runs = []
    for number in range(config.seeds):
        run = _train(config, programs, task, number, stop)
        runs.append(run)
        if run["bits"] is None:
            seed = training.seed + number
            skipped = run["skipped"]
            reason = f"seed {seed}: {skipped} steps of workers not finite"
            record |= {"status": "diverged", "reason": reason}
    record |= {key: [run[key] for run in runs] for key in runs[0]}
    record["compile_seconds"] = programs.compile_seconds


def _train(
    config: OuterConfig, programs: MethodPrograms, task: OuterTask, number: int, stop: StopRequest
) -> Record:
    """Train one seed; `bits` is None where it diverged."""
    assembly = programs.assembly
    training = assembly.plan.config.training
    state = programs.begin(task.params[number], key_of(config, number))
    measured = []
    for rows in task.training[number]:
        check_stop(stop)
        batch = global_batch(rows_of_batch(rows, training.batch_size), task.mesh)
        state, metrics = programs.step(state, batch)
        measured.append(metrics)
    state = assembly.workers.publish(state)
    metrics = fetch_metrics(measured)
    bits = evaluate(task.evaluate, state.params, state.router_state, task.held_out).bits_per_token
    diverged = has_diverged([m.skipped_in_a_row for m in metrics], training)
    return {
        "bits": None if diverged else finite(bits),
        "spread": _mean_spread(metrics),
        "skipped": int(state.skipped),
    }


def _bytes(assembly: Assembly, name: str, workers: int) -> float:
    """Return the bytes that a worker sends in a mean step; for `none`, one of as many workers."""
    if name == ALONE:
        return 0.0
    if assembly.plan.config.replicas.exchanges == "nothing":
        return synchronous_bytes(assembly, workers)
    return sent_per_step(assembly)


def _mean_spread(metrics: tuple[StepMetrics, ...]) -> float | None:
    """Return the mean distance of messages from the pseudo-gradient over its norm, after the first
    exchange; None for methods that exchange no parameters."""
    values = [float(m.exchange["spread"]) for m in metrics if "spread" in m.exchange]
    spreads = [value for value in values if value > 0.0]
    return finite(np.mean(spreads)) if spreads else None
