# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Runs one trial of `routers`: one method, one objective, all seeds on both kinds of data.

    same data, same initial values (router apart), same active FLOPs, one compilation: the seed and
    the data are arguments of the compiled step

A method is admitted to the autoregressive table if other tokens from position j on leave the
evaluation logits before j unchanged, bit for bit, before and after training.

A trial that cannot finish is a record with a status and a reason, and the next one runs: `done`,
`diverged` (steps refused as not finite), `refused` (parts that do not go together), `failed`,
`no ticket` (not causal).

To add an objective: a row of OBJECTIVES in experiments/studies/routers/trial.py
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from experiments.bench.measure import in_turns
from experiments.studies.programs import RARE, StudyPrograms
from experiments.studies.routers.config import ObjectiveName, RoutersConfig, model_of, objective_of
from experiments.studies.routers.data import RoutersTask
from experiments.studies.trials import (
    TRIAL_ERRORS,
    Record,
    error_record,
    finite,
    has_diverged,
    train,
)
from jaxmoe import training
from jaxmoe.configs import to_json
from jaxmoe.data import Batch, normalized_mutual_information
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.config import ModelConfig
from jaxmoe.models.transformer import forward
from jaxmoe.resilience.stop import StopRequest
from jaxmoe.routing import METHODS, RouterStatistics
from jaxmoe.routing.composition import RoutingWarning
from jaxmoe.routing.telemetry.trace import save_trace
from jaxmoe.run.measures import record_trace
from jaxmoe.scaling.initialize import parameter_table
from jaxmoe.training import Objective
from jaxmoe.training.evaluate import evaluate
from jaxmoe.training.state import TrainState

OBJECTIVES: dict[ObjectiveName, Callable[[], Objective]] = {
    "autoregressive": training.NextTokenConfig,
    "masked_diffusion": lambda: training.MaskedDiffusionConfig(eval_times=4),
}

_EXECUTION = ExecutionConfig(unroll=2)
_TIMED_STEPS = 4


class RouterPrograms(StudyPrograms):
    """Compiled programs of one method.

    Args:
        config: Config of the comparison.
        model: Model of the method.
        objective: Objective of the training.
        batch: A batch of the shapes to come.
    """

    def __init__(
        self, config: RoutersConfig, model: ModelConfig, objective: ObjectiveName, batch: Batch
    ):
        schedule = config.schedule.build(config.training.steps)
        super().__init__(
            model,
            config.optimizer.build(parameter_table(model), schedule),
            batch,
            training=config.training,
            objective=OBJECTIVES[objective](),
            execution=_EXECUTION,
        )

    @functools.cached_property
    def look(self) -> Callable[[Any, Any, Batch, Array], tuple[Array, RouterStatistics]]:
        """Program to evaluation logits and statistics of a held-out batch, for one examination."""
        look = _look_of(self.model, self.objective)
        state = self.any_state
        arguments = (state.params, state.router_state, self.batch, jnp.int32(0))
        return self.compile(look, *arguments, options=RARE)


def _look_of(model: ModelConfig, objective: Objective) -> Any:
    """Return the jitted function of `RouterPrograms.look`."""

    @jax.jit
    def look(params: Any, router_state: Any, batch: Batch, index: Array) -> Any:
        batch = objective.examine(model, batch, index, _EXECUTION.placement)
        output = forward(
            model,
            _EXECUTION,
            params,
            jnp.asarray(batch.tokens),
            positions=batch.positions,
            segment_ids=batch.segment_ids,
            router_state=router_state,
            context={} if batch.mask_ratio is None else {"mask_ratio": batch.mask_ratio},
        )
        return output.logits, output.statistics

    return look


def earlier_logits_hold(
    logits_of: Callable[[np.ndarray], Array], tokens: Any, vocab_size: int
) -> bool:
    """Return whether no token affects logits before it.

    Args:
        logits_of: Function from tokens [B S] to evaluation logits [B S V].
        tokens: Tokens [B S], S at least 2.
        vocab_size: Number of token ids.
    """
    tokens = np.asarray(tokens)
    length = tokens.shape[1]
    random = np.random.default_rng(0)
    before = np.asarray(logits_of(tokens))
    for place in sorted({1, length // 2, length - 1}):
        changed = tokens.copy()
        shift = random.integers(1, vocab_size, changed[:, place:].shape, dtype=changed.dtype)
        changed[:, place:] = (changed[:, place:] + shift) % vocab_size
        after = np.asarray(logits_of(changed))
        if before[:, :place].tobytes() != after[:, :place].tobytes():
            return False
    return True


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RoutersTrial:
    """A method that is to be trained with one objective."""

    config: RoutersConfig
    """Config of the comparison."""
    name: str
    """Name of the method."""
    objective: ObjectiveName
    """Objective of the training."""
    tasks: Mapping[str, RoutersTask]
    """Data by name."""
    baseline: Callable[[], RouterPrograms]
    """Function to the programs of the baseline, for the time of a step."""
    trace_file: pathlib.Path | None = None
    """Path for the routing of the held-out text; none is written when None."""


def run_trial(trial: RoutersTrial, stop: StopRequest) -> tuple[Record, RouterPrograms | None]:
    """Run one trial.

    Args:
        trial: Method, objective and data.
        stop: Checked at every step.

    Returns:
        The record, as JSON, and the programs if there are any.

    Raises:
        StoppedError: A signal arrived.
    """
    started = time.perf_counter()
    programs = None
    config, name, objective = trial.config, trial.name, trial.objective
    record: Record = {"method": name, "objective": objective, "source": METHODS[name].source}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RoutingWarning)
        try:
            record["moe"] = moe_json(config, name)
            programs = _fill(record, trial, stop)
        except TRIAL_ERRORS as error:
            record |= error_record(name, error)
    said = {str(w.message) for w in caught if issubclass(w.category, RoutingWarning)}
    record |= {"warnings": sorted(said), "seconds": time.perf_counter() - started}
    return record, programs


def moe_json(config: RoutersConfig, name: str) -> Any:
    """Return the layer of a method; a record with another layer is outdated."""
    return to_json(model_of(config, name, objective_of(name)).moe)


def _fill(record: Record, trial: RoutersTrial, stop: StopRequest) -> RouterPrograms | None:
    """Fill the record: causality, training, evaluation, time."""
    config, name, objective = trial.config, trial.name, trial.objective
    model = model_of(config, name, objective)
    batch = trial.tasks["corpus"].held_out[0]
    if objective == "masked_diffusion":
        record["causal"] = _is_causal_at_first(config, name, batch)
    programs = RouterPrograms(config, model, objective, batch)
    record |= {"status": "done", "parameters_total": parameter_table(model).total}
    if objective == "autoregressive":
        record["causal"] = _has_ticket(programs, programs.init(_key(config, 0)), batch)
        if not record["causal"]:
            record |= {"status": "no ticket", "reason": "a later token changes earlier logits"}
            return programs
    for task in trial.tasks.values():
        runs = []
        for number in range(config.seeds):
            run, state = _train(config, programs, task, number, stop)
            runs.append(run)
            if trial.trace_file is not None and task.name == "corpus" and number == 0:
                arguments = (model, _EXECUTION, state.params, state.router_state, task.held_out)
                save_trace(trial.trace_file, record_trace(*arguments))
            if run["bits"] is None:
                what = f"{task.name}, seed {config.training.seed + number}"
                reason = f"{what}: {run['skipped']} of {config.training.steps} steps not finite"
                record |= {"status": "diverged", "reason": reason}
        record[task.name] = {key: [run[key] for run in runs] for key in runs[0]}
        if objective == "autoregressive" and not _has_ticket(programs, state, batch):
            reason = "once trained, a later token changes earlier logits"
            record |= {"causal": False, "status": "no ticket", "reason": reason}
    record["step_ratio"] = _time_beside(config, programs, trial.baseline(), batch)
    record["compile_seconds"] = programs.compile_seconds
    return programs


def _train(
    config: RoutersConfig,
    programs: RouterPrograms,
    task: RoutersTask,
    number: int,
    stop: StopRequest,
) -> tuple[Record, TrainState]:
    """Train one seed on one kind of data; `bits` is None where it diverged."""
    batches = task.training[number]
    state, metrics = train(programs, _key(config, number), batches, stop)
    violation = np.array([m.router["max_violation"] for m in metrics], float)
    dropped = np.array([m.router["dropped_fraction"] for m in metrics], float)
    run: Record = {
        "skipped": int(state.skipped),
        "max_violation": [finite(value) for value in violation],
        "dropped_fraction": finite(dropped.mean()),
        "dead_fraction": finite(metrics[-1].router["dead_fraction"]),
        "loss": finite(metrics[-1].loss),
        **_evaluate(config, programs, task, state),
    }
    if has_diverged([m.skipped_in_a_row for m in metrics], config.training):
        run["bits"] = None
    return run, state


def _evaluate(
    config: RoutersConfig, programs: RouterPrograms, task: RoutersTask, state: TrainState
) -> Record:
    """Return held-out bits, language-expert information, and the experts' share of the FLOPs."""
    arguments = (state.params, state.router_state)
    evaluation = evaluate(programs.evaluate, *arguments, task.held_out)
    number = programs.objective.num_examined
    sums = [
        jax.device_get(programs.look(*arguments, batch, jnp.int32(index))[1])
        for batch in task.held_out
        for index in range(number)
    ]
    moe = programs.model.moe
    base = config.model.moe
    assert moe is not None and base is not None
    computed = sum(float(s.kept[:, : moe.num_experts].sum()) for s in sums)
    tokens = sum(float(s.num_tokens.sum()) for s in sums)
    result: Record = {
        "bits": finite(evaluation.bits_per_token * task.tokens_per_unit),
        "expert_flops_ratio": finite(
            computed * moe.expert_dim / (tokens * base.top_k * base.expert_dim)
        ),
    }
    if task.languages:
        counts = np.stack([s.counts for s in sums], axis=1)  # L, looks, E
        languages = np.repeat(task.languages, number)
        is_of = np.eye(max(task.languages) + 1)[:, languages]  # M, looks
        result["mutual_information"] = [
            normalized_mutual_information(is_of @ layer) for layer in counts
        ]
    return result


def _has_ticket(programs: RouterPrograms, state: TrainState, batch: Batch) -> bool:
    def logits_of(tokens: np.ndarray) -> Array:
        changed = dataclasses.replace(batch, tokens=jnp.asarray(tokens))
        return programs.look(state.params, state.router_state, changed, jnp.int32(0))[0]

    return earlier_logits_hold(logits_of, batch.tokens, programs.model.vocab_size)


def _is_causal_at_first(config: RoutersConfig, name: str, batch: Batch) -> bool:
    """Return whether a method that is trained by masked diffusion is causal at initialisation.

    A router whose traits say that it is not causal is not examined: no causal model accepts it.
    """
    if not METHODS[name].router.traits.is_causal:
        return False
    programs = RouterPrograms(
        config, model_of(config, name, "autoregressive"), "autoregressive", batch
    )
    return _has_ticket(programs, programs.init(_key(config, 0)), batch)


def _time_beside(
    config: RoutersConfig, programs: RouterPrograms, baseline: RouterPrograms, batch: Batch
) -> float | None:
    """Return the time of a training step over the baseline's, medians of rounds; 1 for itself."""
    if programs.model == baseline.model:
        return 1.0

    def turns(programs: RouterPrograms) -> Callable[[], float]:
        state = programs.init(_key(config, 0))

        def run() -> float:
            nonlocal state
            started = time.perf_counter()
            for _ in range(_TIMED_STEPS):
                state, _ = programs.step(state, batch)
            jax.block_until_ready(state.params)
            return time.perf_counter() - started

        return run

    candidates = {"method": turns(programs), "baseline": turns(baseline)}
    timings = in_turns(candidates, rounds=config.timing_rounds, warm_up=1)
    return timings["method"].median / timings["baseline"].median


def _key(config: RoutersConfig, number: int) -> Array:
    return jax.random.key(config.training.seed + number)
