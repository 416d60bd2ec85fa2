# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Measures one model of `gates` at initialisation over many seeds, and trains some of them.

Every quantity is a mean over MoE layers on held-out batches, in evaluation:

    rms             sqrt(mean y^2) of the MoE branch's output, before the residual multiplier
    correlation     mean cosine of two experts' outputs for a token; None for K = 1
    router_z        mean of (logsumexp of the router logits)^2
    bits            held-out bits per token

The seed is an argument of the compiled programs: a point compiles three programs for all seeds.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from experiments.studies.data import batches_of, check_vocabulary, digest_of, held_out_batches
from experiments.studies.gates.config import GatesConfig, Point, model_of
from experiments.studies.programs import RARE, StudyPrograms
from experiments.studies.study import check_stop
from experiments.studies.trials import Record, finite, has_diverged, train
from jaxmoe.configs import to_json
from jaxmoe.contrib.telemetry.indicators import summarise_indicators
from jaxmoe.data import Batch, Source
from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.observer import Observations
from jaxmoe.resilience.stop import StopRequest
from jaxmoe.scaling import Budget
from jaxmoe.scaling.initialize import parameter_table
from jaxmoe.training.loss import forward_and_nll
from jaxmoe.training.state import TrainState

MEASURED = ("rms", "correlation", "router_z", "bits")

_EXECUTION = ExecutionConfig(unroll=2)
_DETAILED = dataclasses.replace(_EXECUTION, telemetry="detailed")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """Data of the trials."""

    source: Source
    held_out: tuple[Batch, ...]
    digest: str
    """Digest of the data."""


def load_task(config: GatesConfig) -> Task:
    """Return the data of every trial.

    Raises:
        ValueError: The vocabulary is too large, or there is too little data.
    """
    source = config.data.build(config.training.seed)
    check_vocabulary(source, config.model)
    held_out = held_out_batches(source, config.training, config.evaluation_batches)
    return Task(source=source, held_out=held_out, digest=digest_of([source]))


class GatePrograms(StudyPrograms):
    """Compiled programs of one point.

    Args:
        config: Config of the comparison.
        point: Point whose model is compiled.
        task: Data of the trials.
    """

    def __init__(self, config: GatesConfig, point: Point, task: Task):
        training = config.training
        budget = Budget(
            tokens=training.tokens, batch_tokens=training.batch_size * training.sequence_length
        )
        rules = config.parameterization.build(model_of(config, point), budget, config.base)
        self.table = parameter_table(rules.model, rules)
        super().__init__(
            rules.model,
            config.optimizer.build(self.table, config.schedule.build(training.steps)),
            task.held_out[0],
            training=training,
            objective=training.objective,
            execution=_EXECUTION,
            parameterization=rules,
        )

    @functools.cached_property
    def look(self) -> Callable[[Any, Any, Batch], tuple[Array, Array, Observations]]:
        """Program from parameters, router state and a batch to sums of nll and weights, and
        indicators."""

        def look(params: Any, router_state: Any, batch: Batch) -> Any:
            nll, output = forward_and_nll(
                self.model, _DETAILED, params, batch, router_state=router_state
            )
            return nll, jnp.asarray(batch.loss_weights).sum(), output.observations

        state = self.any_state
        arguments = (state.params, state.router_state, self.batch)
        return self.compile(jax.jit(look), *arguments, options=RARE)

    def measure(self, state: TrainState, batches: Sequence[Batch]) -> dict[str, float | None]:
        """Return MEASURED of a state on some batches, as JSON."""
        looks = [self.look(state.params, state.router_state, batch) for batch in batches]
        nll, weight, indicators = (
            functools.reduce(operator.add, parts) for parts in zip(*looks, strict=True)
        )
        residual = self.model.forward_multipliers.residual
        summary = jax.device_get(summarise_indicators(indicators, residual_multiplier=residual))
        names = {"rms": "feed_forward_rms", "correlation": "expert_correlation"}
        layers = np.isfinite(summary["router_z"])  # those with experts
        values = {
            name: summary[source][layers].mean() if source in summary else None
            for name, source in {**names, "router_z": "router_z"}.items()
        }
        values["bits"] = nll / weight / math.log(2.0)
        return {name: finite(values[name]) for name in MEASURED}


def point_json(config: GatesConfig, point: Point) -> Any:
    """Return the layer of a point; a record with another layer is outdated."""
    return to_json(model_of(config, point).moe)


def run_trial(config: GatesConfig, point: Point, task: Task, stop: StopRequest) -> Record:
    """Measure and train one point.

    Returns:
        The record, as JSON.

    Raises:
        StoppedError: A signal arrived.
        ValueError: The optimiser and the parameterisation do not go together.
    """
    started = time.perf_counter()
    programs = GatePrograms(config, point, task)
    record: Record = {**dataclasses.asdict(point), "moe": point_json(config, point)}
    initial = []
    for number in range(config.initial_seeds):
        check_stop(stop)
        initial.append(programs.measure(programs.init(_key(config, number)), task.held_out[:1]))
    record["initial"] = _by_name(initial)
    record["trained"] = None
    if point.top_k in config.trained_top_ks:
        runs = [_train(config, programs, task, n, stop) for n in range(config.seeds)]
        record["trained"] = _by_name(runs)
    record["compile_seconds"] = programs.compile_seconds
    record["seconds"] = time.perf_counter() - started
    return record


def _train(
    config: GatesConfig, programs: GatePrograms, task: Task, number: int, stop: StopRequest
) -> dict[str, float | None]:
    """Train once; return MEASURED at the end, the largest router Z, and the steps refused."""
    batches = batches_of(task.source, config.training, config.training.seed + number)
    state, metrics = train(programs, _key(config, number), batches, stop)
    measured = programs.measure(state, task.held_out)
    if has_diverged([m.skipped_in_a_row for m in metrics], config.training):
        measured = dict.fromkeys(measured)
    peak = finite(np.max([m.router["router_z"] for m in metrics]))
    return {**measured, "router_z_peak": peak, "skipped": int(state.skipped)}


def _by_name(rows: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    return {name: [row[name] for row in rows] for name in rows[0]}


def _key(config: GatesConfig, number: int) -> Array:
    return jax.random.key(config.training.seed + number)
