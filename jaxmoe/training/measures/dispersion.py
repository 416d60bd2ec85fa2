# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Compares workers with each other, to find errors that a mean over devices hides.

A worker is a part of the mesh with rows of its own: a position on the axes replica x data x expert.
All workers train the same weights on rows of the same distribution, so that their losses and
gradients differ by chance alone; one that computes something else is an outlier long before the
mean moves (silent inconsistency, arXiv 2602.14462).

    loss_std, loss_range    over workers, of the mean cross-entropy of their rows, at every step
    grad_norm_std           over workers, of the norm of the gradient of that loss
    grad_cosine             mean over pairs: (|sum of g_i/|g_i||^2 - N) / (N (N - 1))
    grad_cosine_from_sums   (N^2 |mean of g_i|^2 - sum |g_i|^2) / (N (N - 1)) / mean |g_i|^2: needs
                            only the mean vector; equal to grad_cosine if all norms are equal

The losses come with the training step, as sums of rows, for one gather of two numbers a row. The
gradients of single workers do not exist in the step, which sums them. `make_gradient_probe`
compiles a separate program: one forward pass over a micro-batch and N backward passes on the same
mesh and layout, each of the loss of one worker. A probe costs about N/1.5 steps of that
micro-batch, and memory for two more trees of gradients. Only the cross-entropy is compared; the
routers' losses are of the whole batch.

`OutlierWatch` names outliers. It needs three workers: of two that differ, either may be wrong.
"""

from __future__ import annotations

import collections
import dataclasses
import typing
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from jaxmoe.data.batch import Batch, HostOrDeviceArray
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.config import ModelConfig
from jaxmoe.training import NextTokenConfig, Objective
from jaxmoe.training.accumulation import first_micro_batch
from jaxmoe.training.loss import forward_and_row_nll
from jaxmoe.training.state import TrainState
from sharding.axes import BATCH_AXES, pieces
from sharding.constrain import Placement

LOSS_STD = "workers/loss_std"
LOSS_RANGE = "workers/loss_range"
NORM_STD = "workers/grad_norm_std"
COSINE = "workers/grad_cosine"
COSINE_FROM_SUMS = "workers/grad_cosine_from_sums"

_MOST_SPREADS = 4.0
"""Difference from the median worker, in spreads, above which a worker is an outlier."""
_LEAST_SHARE = 1e-4
"""Smallest difference of an outlier, as a share of the median."""


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


def worker_losses(
    row_nll: Float[Array, " b"] | None,
    row_tokens: Float[Array, " B"] | None,
    workers: int,
    placement: Placement,
) -> Float[Array, " W"] | None:
    """Return the mean loss of each worker, replicated on all devices; None without rows.

    Args:
        row_nll: Sums of rows over micro-batches, [B / micro-batches].
        row_tokens: Divisor of each row.
        workers: Number of equal parts of the rows, in order.
        placement: Layout of the rows.
    """
    if row_nll is None or row_tokens is None:
        return None
    tokens = row_tokens.reshape(row_nll.shape[0], -1).sum(axis=1)
    rows = (placement.place(of_rows, (None,)) for of_rows in (row_nll, tokens))
    nll, tokens = (of_rows.reshape(workers, -1).sum(axis=1) for of_rows in rows)
    return jnp.where(tokens > 0.0, nll / jnp.where(tokens > 0.0, tokens, 1.0), jnp.nan)


def loss_scalars(worker_loss: Float[HostOrDeviceArray, " W"] | None) -> dict[str, float]:
    """Return standard deviation and range over the workers that have tokens.

    Args:
        worker_loss: Losses of one step; None gives no scalars.
    """
    if worker_loss is None:
        return {}
    there = np.asarray(worker_loss, np.float64)
    there = there[~np.isnan(there)]
    if not there.size:
        return {}
    return {LOSS_STD: float(there.std()), LOSS_RANGE: float(np.ptp(there))}


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
        one, norm = of_one(weights)
        return jax.tree.map(jnp.add, sums, one), norm

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
            found = worker_losses(rows, tokens, workers, placement)
            assert found is not None  # rows were asked for
            return jnp.nan_to_num(found, nan=0.0)

        loss, pull_back = jax.vjp(losses, state.params)
        norms, cosine, from_sums = compare_gradients(lambda w: pull_back(w)[0], workers)
        return WorkerGradients(loss=loss, norm=norms, cosine=cosine, cosine_from_sums=from_sums)

    return jax.jit(probe)


def worker_devices(mesh: Mesh, workers: int) -> list[list[jax.Device]]:
    """Return the devices that hold the rows of each worker.

    Args:
        mesh: Mesh from `sharding.make_mesh`.
        workers: Parts of the batch; a multiple or a divisor of the parts that the mesh makes.
    """
    spec = PartitionSpec(pieces(mesh.axis_names, BATCH_AXES))
    parts = NamedSharding(mesh, spec).num_devices
    found: list[list[jax.Device]] = [[] for _ in range(workers)]
    layout = NamedSharding(mesh, spec).devices_indices_map((parts * workers,))
    for device, (rows,) in layout.items():
        first, last = rows.start or 0, parts * workers if rows.stop is None else rows.stop
        for worker in range(first // parts, (last - 1) // parts + 1):
            found[worker].append(device)
    return found


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Outlier:
    """Worker whose values differ from those of the others."""

    worker: int
    excess: float
    """Median over the window of the difference from the median worker."""
    spreads: float
    """The excess in spreads."""


class OutlierWatch:
    """Differences of workers from the median worker, over a window of steps.

    A worker is an outlier when the median of its differences over the window is more than 4
    spreads, 1.4826 x the median size of all differences in the window: one odd batch moves
    neither. Each is named once.

    Args:
        window: Steps; no worker is judged before the window is full.
    """

    def __init__(self, window: int):
        self._rows: collections.deque[np.ndarray] = collections.deque(maxlen=window)
        self._named: set[int] = set()

    def add(self, values: Float[np.ndarray, " W"]) -> list[Outlier]:
        """Return the outliers that have not been named yet.

        Args:
            values: One value for each worker; a step with a value that is not finite is skipped.
        """
        values = np.asarray(values, np.float64)
        if len(values) < 3 or not np.isfinite(values).all():
            return []
        self._rows.append(values)
        if len(self._rows) < (self._rows.maxlen or 0):
            return []
        rows = np.stack(self._rows)
        center = np.median(rows, axis=1, keepdims=True)
        differences = rows - center
        spread = 1.4826 * float(np.median(np.abs(differences)))
        floor = _LEAST_SHARE * float(np.median(np.abs(center)))
        scale = max(spread, floor / _MOST_SPREADS, np.finfo(np.float64).tiny)
        excess = np.median(differences, axis=0)
        found = [
            Outlier(worker=int(w), excess=float(excess[w]), spreads=float(abs(excess[w]) / scale))
            for w in np.flatnonzero(np.abs(excess) > _MOST_SPREADS * scale)
            if int(w) not in self._named
        ]
        self._named.update(outlier.worker for outlier in found)
        return found
