# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`RolloutFeed`: each training step draws its own batch: answers, rewards, log-probabilities.

    state -> answers by the state's parameters -> batch -> (next state, metrics)

A step trains on its answers `rl.epochs` times, in `rl.minibatches` updates each. Old and reference
log-probabilities are those before the first update. The guard judges each update, and a step counts
as refused if all its updates were.

The queue of answers is empty at checkpoints, so that a resumed run continues bitwise.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import jax
import numpy as np
from jax.sharding import Mesh

from jaxmoe.contrib.rl.advantages import k3
from jaxmoe.contrib.rl.batches import RolloutSample, batch_of, drawn_order
from jaxmoe.contrib.rl.config import RolloutsConfig
from jaxmoe.contrib.rl.engine_parameters import EngineParameters
from jaxmoe.contrib.rl.objective import (
    ADVANTAGES,
    OLD,
    REFERENCE,
    SAMPLER_WEIGHTS,
    PolicyGradientConfig,
)
from jaxmoe.contrib.rl.queue import AnswerQueue
from jaxmoe.contrib.rl.rollouts import Rollouts, check_lengths, on_one_device
from jaxmoe.contrib.rl.turns import TurnCodec
from jaxmoe.data import Source
from jaxmoe.data.batch import Batch
from jaxmoe.errors import EndRunError, JaxmoeError
from jaxmoe.execution import ExecutionConfig
from jaxmoe.generation.text import encode_prompts, separator_of
from jaxmoe.models.config import ModelConfig
from jaxmoe.parameters import ParameterTable
from jaxmoe.routing.replay import EXPERTS, why_not_replayed
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.provenance.saved import imported_ends
from jaxmoe.scaling.initialize import parameter_table
from jaxmoe.serve.device.pages import why_not_served
from jaxmoe.tracking.tracker import (
    AHEAD,
    ANSWER_LENGTH,
    CLIPPED,
    DIVERGENCE,
    DROPPED,
    REPLAYED,
    REWARD,
    ROLLOUT_SECONDS,
    SOLVED,
    STALE,
    TRAIN_SECONDS,
)
from jaxmoe.training.feed import Feed, StepFunction
from jaxmoe.training.loss import token_log_probs
from jaxmoe.training.state import TrainState
from jaxmoe.training.step import StepMetrics
from sharding.distributed import global_batch

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Learner:
    """What is trained, and how batches are made for it."""

    config: RolloutsConfig
    objective: PolicyGradientConfig
    model: ModelConfig
    execution: ExecutionConfig
    """Execution with the mesh resolved."""
    mesh: Mesh
    length: int
    """Predictions of a row, S."""
    seed: int
    """Seed of the run."""
    accumulation: int = 1
    """Micro-batches of an update."""

    @classmethod
    def of(cls, plan: Any, execution: ExecutionConfig, mesh: Mesh) -> Learner:
        """Return how the batches of a run with `rl` are made.

        Args:
            plan: `jaxmoe.run.plan.RunPlan`.
            execution: Execution with the mesh resolved.
            mesh: Devices.
        """
        config = plan.config
        return cls(
            config=config.rl,
            objective=config.training.objective,
            model=plan.model,
            execution=execution,
            mesh=mesh,
            length=config.training.sequence_length,
            seed=config.training.seed,
            accumulation=config.training.accumulation,
        )

    @property
    def micro_rows(self) -> int:
        """Answers of a micro-batch of an update."""
        return self.config.num_answers // self.config.minibatches // self.accumulation

    def example(self) -> Batch:
        """Return a batch on the devices, of the shapes of the batches of all updates."""
        sample = RolloutSample(prompt=(0,), answer=(0,), log_probs=(0.0,), text="", reward=0.0)
        rows = self.config.num_answers // self.config.minibatches
        batch = self.batch([sample] * rows)
        names = [REFERENCE] if self.objective.beta else []
        names += [SAMPLER_WEIGHTS] if self.config.truncation is not None else []
        zeros = np.zeros_like(batch.loss_weights)
        extra = batch.extra | {name: zeros for name in names}
        if self.config.replay:
            shape = (*zeros.shape, *self._expert_dims)
            extra[EXPERTS] = np.full(shape, -1, np.int32)
        return global_batch(dataclasses.replace(batch, extra=extra), self.mesh)

    @property
    def _expert_dims(self) -> tuple[int, int]:
        """MoE layers and experts of a token."""
        moe = self.model.moe
        assert moe is not None  # checked by the run
        return self.model.num_moe_layers, moe.top_k

    def batch(self, samples: Sequence[RolloutSample]) -> Batch:
        """Return the batch of answers on the host, with the engine's log-probabilities.

        Args:
            samples: Answers of a step.
        """
        return batch_of(
            samples,
            self.objective,
            group=self.config.group,
            length=self.length,
            longest=self.config.max_tokens,
        )

    def updates(
        self, samples: Sequence[RolloutSample], batch: Batch, seed: tuple[int, ...]
    ) -> Iterator[Batch]:
        """Yield the batches of the updates of a step, on the host.

        Args:
            samples: Answers of the step.
            batch: All of them, with all that the objective reads.
            seed: Numbers of the run and the step, which decide the order.
        """
        group = self.config.group
        prompts = self.config.prompts
        for epoch in range(self.config.epochs):
            for chosen in drawn_order(prompts, self.config.minibatches, (*seed, epoch)):
                rows = (chosen[:, None] * group + np.arange(group)).reshape(-1)
                # Weights are those of a batch of its own; the rest is read from the whole.
                update_batch = self.batch([samples[row] for row in rows])
                extra = {name: np.asarray(array)[rows] for name, array in batch.extra.items()}
                yield dataclasses.replace(update_batch, extra=extra)


class NoAnswersError(EndRunError):
    """An answer could not be drawn or scored; the state is that before the step, and is saved."""

    status: ClassVar[str] = "interrupted"


class RolloutFeed(Feed):
    """Answers of the model in training.

    Args:
        learner: What is trained.
        source: Tokens of prompts and answers.
        every: Steps between checkpoints.
        last_step: Total number of steps.
        directory: Run directory, which keeps the ids that end a text of the model; None for none.
        turns: Writes prompts as conversations; None leaves them as they are.
    """

    def __init__(
        self,
        learner: Learner,
        source: Source,
        *,
        every: int,
        last_step: int,
        directory: str | None = None,
        turns: TurnCodec | None = None,
    ):
        self._learner = learner
        self._turns = turns
        self._directory = directory
        self._source = source
        self._every = every
        self._last_step = last_step
        self._measures: dict[str, float] = {}

    def check(self) -> None:
        """Raise if the engine cannot compute the answers, or the task cannot be built.

        Raises:
            ValueError: The model cannot be served, there are several processes, the reward's file
                or function cannot be used, or a prompt of the first step is too long or cannot be
                encoded.
        """
        learner = self._learner
        execution = learner.execution
        adapter = learner.model.adapter
        config = learner.config
        task = config.reward.build()
        if separator_of(self._source) is not None:
            first = task.prompts(0, config.prompts, learner.seed)
            texts = [question.prompt for question in first]
            codec = self._source if self._turns is None else self._turns
            check_lengths(encode_prompts(codec, texts), config, learner.length)
        if (reason := why_not_served(learner.model, execution, None)) is not None:
            raise ValueError(f"rl answers prompts with the engine: {reason}")
        if learner.config.replay:
            if (reason := why_not_replayed(learner.model)) is not None:
                raise ValueError(f"rl.replay=True: {reason}; or set it to False")
        if adapter is not None and adapter.backward is not None:
            raise ValueError(
                f"model.adapter:{adapter.name} draws its additions anew in each training pass, and"
                " rl compares a pass with the answers of the engine: choose another adapter"
            )
        if jax.process_count() > 1:
            raise ValueError(
                f"rl answers prompts in one process, and there are {jax.process_count()}: start one"
            )

    def batch(self, step: int) -> Batch:
        """Return a batch of the shapes of all updates."""
        del step
        return self._learner.example()

    def batches(self, first_step: int) -> Generator[Batch, None, None]:
        """Yield a batch of these shapes for each step, which the step does not read."""
        del first_step
        yield from itertools.repeat(self._learner.example())

    @contextlib.contextmanager
    def session(
        self,
        step_function: StepFunction,
        log: Callable[[int, Mapping[str, float]], None],
        first_state: Callable[[], TrainState],
    ) -> Generator[StepFunction, None, None]:
        """Open the engine, which compiles at the first step, and compute the reference model."""
        learner = self._learner
        ends: tuple[int, ...] = ()
        if self._directory is not None:
            size = learner.model.vocab_size
            ends = imported_ends(RunDirectory(self._directory), size)
        if (separator := separator_of(self._source)) is not None:
            ends = (separator, *ends)
        end_ids, end_texts = ((), ()) if self._turns is None else self._turns.ends
        rollouts = Rollouts(
            learner.config,
            learner.model,
            learner.execution,
            self._source if self._turns is None else self._turns,
            length=learner.length,
            seed=learner.seed,
            ends=tuple(dict.fromkeys((*ends, *end_ids))),
            stop=(*learner.config.stops, *end_texts),
        )
        with contextlib.closing(rollouts):
            self._rollouts = rollouts
            self._queue = AnswerQueue(
                staleness=learner.config.staleness, every=self._every, last_step=self._last_step
            )
            self._log = log
            self._reference: tuple[Any, Any] | None = None
            if learner.objective.beta:
                self._reference = self._reference_of(first_state())
            sync = learner.config.sync
            self._engine_params = None if sync == "copy" else EngineParameters(sync)
            self._log_probs = jax.jit(
                functools.partial(
                    token_log_probs,
                    learner.model,
                    learner.execution,
                    objective=learner.objective,
                    micro_rows=learner.micro_rows,
                )
            )
            yield functools.partial(self.train, step_function)

    def train(
        self, step_function: StepFunction, state: TrainState, batch: Batch
    ) -> tuple[TrainState, StepMetrics]:
        """Draw answers, train on them, and log their measures.

        Args:
            step_function: Training step.
            state: State before the step; donated.
            batch: Not read.

        Raises:
            NoAnswersError: An answer could not be drawn or scored.
        """
        del batch
        number = int(state.step)
        start_time = time.perf_counter()
        sent = self._draw(state, self._queue.due(number))
        try:
            samples, stale = self._rollouts.take()
        except (JaxmoeError, ValueError) as error:
            raise NoAnswersError(str(error)) from error
        drawn = time.perf_counter()
        counts = self._rollouts.counts()
        rows, measures = self._prepare(state, self._learner.batch(samples))
        state, metrics, clipped = self._update(step_function, state, samples, rows)
        measures[CLIPPED] = clipped
        jax.block_until_ready(metrics.loss)
        times = {ROLLOUT_SECONDS: drawn - start_time, TRAIN_SECONDS: time.perf_counter() - drawn}
        measures |= _measures(samples) | sent | times
        measures |= {STALE: float(stale), DROPPED: counts.dropped, AHEAD: counts.waiting}
        self._log(number + 1, measures)
        return state, metrics

    def _draw(self, state: TrainState, steps: range) -> dict[str, float]:
        """Start to draw the answers of some steps; return the measures of what the engine got."""
        self._rollouts.advance(int(state.step))
        if not steps:
            return {}
        params = state.params
        sent = dict[str, float]()
        if self._engine_params is not None:
            params, sent = self._engine_params.follow(params)
        device = self._learner.mesh.devices.flat[0]
        is_copied = self._learner.config.staleness > 0  # the step donates its arrays
        params, routers = (
            on_one_device(tree, device, is_copied=is_copied)
            for tree in (params, state.router_state)
        )
        for step in steps:
            self._rollouts.draw(step, params, routers or None)
        return sent

    def _update(
        self,
        step_function: StepFunction,
        state: TrainState,
        samples: Sequence[RolloutSample],
        batch: Batch,
    ) -> tuple[TrainState, StepMetrics, float]:
        """Return the state after the updates of a step, its metrics, and the share of tokens whose
        ratio the objective has cut, over all updates."""
        config = self._learner.config
        mesh = self._learner.mesh
        seed = (self._learner.seed, int(state.step))
        in_a_row = int(state.skipped_in_a_row)
        step_metrics = list[StepMetrics]()
        cut = 0
        read = 0
        for number, rows in enumerate(self._learner.updates(samples, batch, seed)):
            is_read = np.asarray(rows.loss_weights) > 0
            read += int(is_read.sum())
            placed = global_batch(rows, mesh)
            # The ratios of the first update are 1 where its parameters gave the old numbers.
            if (number or config.old == "engine") and np.any(rows.extra[ADVANTAGES]):
                current = jax.device_get(
                    self._log_probs(state.params, placed, router_state=state.router_state)
                )
                old, advantages = (np.asarray(rows.extra[name]) for name in (OLD, ADVANTAGES))
                is_cut = self._learner.objective.is_cut(current - old, advantages)
                cut += int((is_cut & is_read).sum())
            if number:  # a step of the run counts as one, whatever its updates
                state = dataclasses.replace(state, step=state.step - 1)
            state, metrics = step_function(state, placed)
            step_metrics.append(metrics)
        state, metrics = _count_once(state, step_metrics, in_a_row)
        return state, metrics, cut / max(read, 1)

    @functools.cached_property
    def _table(self) -> ParameterTable:
        return parameter_table(self._learner.model)

    @property
    def _moves_base(self) -> bool:
        """Whether frozen parameters change."""
        adapter = self._learner.model.adapter
        return adapter is not None and adapter.moves_base

    def _reference_of(self, state: TrainState) -> tuple[Any, Any]:
        """Return what a model has beside the one in training: parameters, without the frozen ones,
        and state of the routers."""
        params = state.params if self._moves_base else self._table.select_trained(state.params)
        return params, state.router_state

    def _prepare(self, state: TrainState, batch: Batch) -> tuple[Batch, dict[str, float]]:
        """Return the batch with what the objective reads, and measures of its tokens."""
        config = self._learner.config
        is_read = np.asarray(batch.loss_weights) > 0
        engine = np.asarray(batch.extra[OLD])
        extra = dict(batch.extra)
        measures = dict[str, float]()
        current = engine

        def log_probs(params: Any, router_state: Any) -> np.ndarray:
            reference_log_probs = self._log_probs(
                params, global_batch(batch, self._learner.mesh), router_state=router_state
            )
            return np.where(is_read, jax.device_get(reference_log_probs), np.float32(0))

        if EXPERTS in extra:
            is_token = np.asarray(batch.segment_ids) != 0
            measures[REPLAYED] = float((np.asarray(extra[EXPERTS]) >= 0)[is_token].mean())
        if config.old == "trainer":
            extra[OLD] = current = log_probs(state.params, state.router_state)
            ratio = np.exp(current - engine)
            measures[DIVERGENCE] = float(k3(current, engine)[is_read].mean())
            if config.truncation is not None:
                extra[SAMPLER_WEIGHTS] = np.minimum(ratio, np.float32(config.truncation))
        if self._reference is not None:
            trained, router_state = self._reference
            params = trained
            if not self._moves_base:
                params = self._table.merge(trained, state.params)
            extra[REFERENCE] = reference = log_probs(params, router_state)
            measures[DIVERGENCE] = float(k3(reference, current)[is_read].mean())
        return dataclasses.replace(batch, extra=extra), measures


def _count_once(
    state: TrainState, metrics: Sequence[StepMetrics], in_a_row: int
) -> tuple[TrainState, StepMetrics]:
    """Return state and metrics of a step whose updates count as one, refused if all of them were.

    Args:
        state: State after the updates.
        metrics: Metrics of each.
        in_a_row: Steps refused in a row before.
    """
    refused = sum(bool(each.is_skipped) for each in metrics)
    is_refused = refused == len(metrics)
    if refused and not is_refused:
        step = int(state.step)
        logger.warning("step %d: %d of %d updates were refused", step, refused, len(metrics))
    too_many = int(state.skipped_in_a_row) - (in_a_row + 1 if is_refused else 0)
    state = dataclasses.replace(
        state,
        skipped=state.skipped - (refused - int(is_refused)),
        skipped_in_a_row=state.skipped_in_a_row - too_many,
    )
    # An array of its own: the next step donates those of the state.
    counted = metrics[-1].skipped_in_a_row - too_many
    return state, dataclasses.replace(_together(metrics), skipped_in_a_row=counted)


def _together(metrics: Sequence[StepMetrics]) -> StepMetrics:
    """Return the metrics of a step from those of its updates: tokens are of all, loss and norms are
    means over the updates that were not refused, if any, and the rest is of the last of these."""
    if len(metrics) == 1:
        return metrics[0]
    accepted = [each for each in metrics if not bool(each.is_skipped)] or metrics
    last = accepted[-1]

    def mean(*values: Any) -> Any:
        return sum(values[1:], values[0]) / len(values)

    return dataclasses.replace(
        last,
        loss=mean(*(each.loss for each in accepted)),
        losses=jax.tree.map(mean, *(each.losses for each in accepted)),
        grad_norm=mean(*(each.grad_norm for each in accepted)),
        num_tokens=sum((each.num_tokens for each in metrics[1:]), metrics[0].num_tokens),
    )


def _measures(samples: Sequence[RolloutSample]) -> dict[str, float]:
    """Return the means of a step over its answers."""
    rewards = np.array([sample.reward for sample in samples])
    return {
        REWARD: float(rewards.mean()),
        SOLVED: float((rewards >= 1.0).mean()),
        ANSWER_LENGTH: float(np.mean([len(sample.answer) for sample in samples])),
    }
