# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Compares the gradients of workers with each other, to find errors that a mean hides.

    grad_norm_std           over workers, of the norm of the gradient of the loss of their rows
    grad_cosine             mean over pairs: (|sum of g_i/|g_i||^2 - N) / (N (N - 1))
    grad_cosine_from_sums   (N^2 |mean of g_i|^2 - sum |g_i|^2) / (N (N - 1)) / mean |g_i|^2: needs
                            only the mean vector; equal to grad_cosine if all norms are equal

The gradients of single workers do not exist in the step, which sums them. `make_gradient_probe`
compiles a separate program: one forward pass over a micro-batch and N backward passes on the same
mesh and layout, each of the loss of one worker. A probe costs about N/1.5 steps of that
micro-batch, and memory for two more trees of gradients. Only the cross-entropy is compared; the
routers' losses are of the whole batch. `jaxmoe/resilience/outliers.py` says what a worker is, and
names those that differ.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jaxtyping import Array, Float

from jaxmoe.data.batch import Batch
from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.context import require_positive
from jaxmoe.models.config import ModelConfig
from jaxmoe.run.assemble import Assembly
from jaxmoe.run.config import RunPartConfig
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.parts import RunPart
from jaxmoe.run.supervision import Supervision, Watches
from jaxmoe.training import NextTokenConfig, Objective
from jaxmoe.training.accumulation import first_micro_batch
from jaxmoe.training.hooks import Hook
from jaxmoe.training.loss import forward_and_row_nll
from jaxmoe.training.parts.worker_losses import worker_losses
from jaxmoe.training.state import TrainState

NORM_STD = "workers/grad_norm_std"
COSINE = "workers/grad_cosine"
COSINE_FROM_SUMS = "workers/grad_cosine_from_sums"


@typing.no_type_check
@struct.dataclass
class WorkerGradients:
    """Result of a gradient probe."""

    loss: Float[Array, " N"]
    """Nats per token of each worker; NaN where it has no token."""
    norm: Float[Array, " N"]
    """Norm of the gradient of that loss; 0 for a worker without tokens."""
    cosine: Float[Array, ""]
    """Mean over pairs of workers that have a gradient."""
    cosine_from_sums: Float[Array, ""]


def gradient_scalars(gradients: WorkerGradients) -> dict[str, float]:
    """Return the scalars to log for a probe.

    Args:
        gradients: Result of a probe, on the host.
    """
    return {
        NORM_STD: float(np.std(np.asarray(gradients.norm, np.float64))),
        COSINE: float(gradients.cosine),
        COSINE_FROM_SUMS: float(gradients.cosine_from_sums),
    }


def compare_gradients(
    pull_back: Callable[[Float[Array, " N"]], Any], workers: int
) -> tuple[Float[Array, " N"], Float[Array, ""], Float[Array, ""]]:
    """Return norms, mean cosine and the cosine from sums; holds two trees beside a gradient.

    Args:
        pull_back: Gradient of a weighted sum of the workers' losses, from the weights.
        workers: Number of workers N.
    """

    def of_one(weights: Array) -> tuple[tuple[Any, Any], Array]:
        gradient = jax.tree.map(lambda g: g.astype(jnp.float32), pull_back(weights))
        norm = optax.tree.norm(gradient)
        inverse = jnp.where(norm > 0.0, 1.0 / jnp.where(norm > 0.0, norm, 1.0), 0.0)
        return (gradient, jax.tree.map(lambda g: g * inverse, gradient)), norm

    def body(sums: tuple[Any, Any], weights: Array) -> tuple[tuple[Any, Any], Array]:
        worker_gradient, norm = of_one(weights)
        return jax.tree.map(jnp.add, sums, worker_gradient), norm

    each = jnp.eye(workers, dtype=jnp.float32)
    sums, first = of_one(each[0])
    (total, units), norms = jax.lax.scan(body, sums, each[1:])
    norms = jnp.concatenate([first[None], norms])
    number = jnp.sum(norms > 0.0).astype(jnp.float32)
    pairs = jnp.maximum(number * (number - 1.0), 1.0)
    squares = jnp.sum(norms**2)
    cosine = (optax.tree.norm(units) ** 2 - number) / pairs
    mean_square = squares / jnp.maximum(number, 1.0)
    from_sums = (optax.tree.norm(total) ** 2 - squares) / pairs
    return norms, cosine, from_sums / jnp.where(mean_square > 0.0, mean_square, 1.0)


def make_gradient_probe(
    model: ModelConfig,
    *,
    workers: int,
    execution: ExecutionConfig | None = None,
    accumulation: int = 1,
    objective: Objective | None = None,
) -> Callable[[TrainState, Batch], WorkerGradients]:
    """Return a jitted function of a state, which is not donated, and the batch of a step.

    Args:
        model: Model to train.
        workers: Equal parts of the batch, at least 2; one backward pass each.
        execution: How it is computed; defaults when None.
        accumulation: Micro-batches of a step, of which the first is probed.
        objective: Training objective; the next token when None.

    Raises:
        ValueError: Fewer than two workers.
    """
    if workers < 2:
        raise ValueError(f"workers={workers} must be at least 2 to be compared")
    execution = execution or ExecutionConfig()
    objective = objective or NextTokenConfig()

    def probe(state: TrainState, batch: Batch) -> WorkerGradients:
        placement = execution.placement
        key = jax.random.fold_in(state.rng, state.step)
        tokens = first_micro_batch(objective.row_tokens(batch), accumulation, placement)
        batch = objective.prepare(model, batch, key, placement)
        row_ids = jnp.arange(batch.tokens.shape[0], dtype=jnp.int32)
        batch, row_ids = jax.tree.map(
            lambda rows: first_micro_batch(rows, accumulation, placement), (batch, row_ids)
        )

        def losses(params: Any) -> Float[Array, " N"]:
            _, rows, _ = forward_and_row_nll(
                model,
                execution,
                params,
                batch,
                objective=objective,
                router_state=state.router_state,
                row_ids=row_ids,
                train=True,
                key=key,
            )
            # A worker without rows has a loss of NaN, which would reach the gradients of all
            # others.
            loss_by_worker = worker_losses(rows, tokens, workers, placement)
            assert loss_by_worker is not None  # rows were asked for
            return jnp.nan_to_num(loss_by_worker, nan=0.0)

        loss, pull_back = jax.vjp(losses, state.params)
        norms, cosine, from_sums = compare_gradients(lambda w: pull_back(w)[0], workers)
        return WorkerGradients(loss=loss, norm=norms, cosine=cosine, cosine_from_sums=from_sums)

    return jax.jit(probe)


_PROBES = 4
"""Number of probes over which a worker must differ."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GradientComparisonConfig(RunPartConfig):
    """Compares the gradients of workers, the parts of the batch, and names those that differ."""

    name: ClassVar[str] = "gradient_comparison"

    every: int = 100
    """Steps between comparisons, which cost a backward pass for each worker."""
    groups: int = 8
    """Largest number of parts of the batch; neighbouring workers are merged."""

    def __post_init__(self):
        require_positive(self.name, self, "every")
        if self.groups < 2:
            raise ValueError(f"{self.name}.groups={self.groups} must be at least 2")

    def build(self, directory: RunDirectory, supervision: Supervision) -> GradientComparison:
        """Return the part."""
        del directory, supervision
        return GradientComparison(self)


class GradientComparison(RunPart):
    """Compares the gradients of the workers every few steps.

    Args:
        config: Steps between comparisons, and parts of the batch.
    """

    def __init__(self, config: GradientComparisonConfig):
        self._config = config

    def hooks(self, assembly: Assembly, watches: Watches) -> Sequence[Hook]:
        """Return the hook that compares; none for one worker."""
        workers = assembly.workers.number
        if workers == 1:
            return ()
        groups = max(n for n in range(1, self._config.groups + 1) if workers % n == 0)
        groups = groups if groups > 1 else workers  # the number of workers is prime

        @functools.cache
        def probe_of(rows: int) -> Callable[[TrainState, Batch], WorkerGradients]:
            return make_gradient_probe(
                assembly.plan.model,
                workers=groups,
                execution=assembly.execution,
                accumulation=assembly.micro_batches(rows),
                objective=assembly.plan.config.training.objective,
            )

        def report(step: int, gradients: WorkerGradients) -> None:
            watches.reporter.log_numbers(step, gradient_scalars(gradients))
            watches.compare(step, "gradient norm", gradients.norm, _PROBES, "probes")

        hook = GradientHook(
            lambda state, batch: probe_of(batch.tokens.shape[0])(state, batch),
            assembly.feed.batch,
            every=self._config.every,
            last_step=assembly.plan.config.training.steps,
            report=report,
        )
        return (hook,)


class GradientHook:
    """Compares the gradients of the workers on the batch of the next step, every so many steps.

    Args:
        probe: Function from `make_gradient_probe`.
        batch: Returns the batch of a step, on the devices.
        every: Steps between comparisons.
        last_step: Last step of the run, after which there is no batch.
        report: Called with the step and the gradients' statistics.
    """

    def __init__(
        self,
        probe: Callable[[Any, Any], WorkerGradients],
        batch: Callable[[int], Batch | None],
        *,
        every: int,
        last_step: int,
        report: Callable[[int, WorkerGradients], None],
    ):
        self._probe = probe
        self._batch = batch
        self._report = report
        self._every = every
        self._last_step = last_step

    def is_due(self, step: int) -> bool:
        """Return whether to compare after a step; never after the last."""
        return step % self._every == 0 and step < self._last_step

    def run(self, step: int, state: TrainState | None) -> None:
        """Compare and report."""
        self._report(step, jax.device_get(self._probe(state, self._batch(step))))
