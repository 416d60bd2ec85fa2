# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Simultaneous perturbation: gradients from pairs of forward passes (MeZO, arXiv 2305.17333).

    p_i = (L(w + epsilon z_i) - L(w - epsilon z_i)) / (2 epsilon),    gradient = 1/q sum_i p_i z_i

z_i is normal noise made anew from a key of step, direction, parameter and layer, so that memory is
that of inference, plus the gradient. The method is gradient descent without a limit: an optimiser
that normalises, or a limit of p_i, leaves little more than the sign of p_i, and runs refuse both.
In a step of one's own, `clip` limits each p_i to [-clip, clip]: the norm of a gradient p z is
p sqrt(d) for d parameters, and says nothing.

On a mesh with replicas there are two forms:

    payload mean             all replicas share z_i. Half of them, for an even number, compute the
                             positive passes of all rows and the others the negative ones (DistZO2,
                             arXiv 2507.03211); scalars are added over the devices of a half.
    payload float32, byte    each replica has its own z and its own rows. It sends p_i, in byte as
                             an 8-bit integer with one scale for all replicas, and all apply the sum
                             of p z over replicas (Just One Byte, arXiv 2306.10015).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxmoe.contrib.estimators.noise import Draw, noise_sum, noise_view, normal
from jaxmoe.contrib.estimators.passes import (
    Given,
    Losses,
    Sums,
    check_forward,
    gradients_with,
    losses_of,
    prepare,
    summed_pass,
    table_of,
)
from jaxmoe.data.batch import Batch
from jaxmoe.optim import LinearConfig, SGDConfig
from jaxmoe.training.accumulation import MicroBatch
from jaxmoe.training.estimators.base import Gradients, StepGradients
from jaxmoe.training.state import TrainState
from sharding.axes import REPLICA
from sharding.constrain import surroundings
from sharding.regions import region, sum_over

if TYPE_CHECKING:
    from jaxmoe.training.step import Step

PLAIN_DESCENT: Mapping[str, Any] = {
    "optimizer": SGDConfig(learning_rate=1e-4),
    "schedule": LinearConfig(warmup_steps=0, floor=1.0),
    "training.clip": None,
}
"""What methods bring that are defined by gradient descent at a constant rate."""
LEVELS = 127
"""Largest 8-bit integer of a byte payload."""


class DirectionalDescent(Gradients):
    """Base class of gradient descent along random directions, by derivatives of forward passes."""

    __slots__ = ()

    clips: ClassVar[Literal["norm", "projection", "nothing"]] = "projection"
    is_backward: ClassVar[bool] = False
    brings: ClassVar[Mapping[str, Any]] = PLAIN_DESCENT
    directions: int
    """Random directions per step, each with two forward passes."""

    @property
    def num_passes(self) -> float:
        """Cost of a step in forward passes."""
        return 2.0 * self.directions

    def check(self, step: Step) -> None:
        """Refuse what forward passes of a view cannot compute; see `check_forward`."""
        check_forward(step)


@dataclasses.dataclass(frozen=True, slots=True)
class Ends:
    """Two points on opposite sides of the parameters, along a direction."""

    epsilon: float
    """Distance from the parameters."""
    draw: Draw = normal
    """Distribution of the direction."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SPSAConfig(DirectionalDescent):
    """Derivatives along random directions, from forward passes only (MeZO)."""

    name: ClassVar[str] = "spsa"
    optimizers: ClassVar[tuple[str, ...]] = ("sgd",)

    directions: int = 1
    """Random directions per step, each with two forward passes."""
    epsilon: float = 1e-3
    """Distance of each pass from the parameters, in standard deviations of the noise."""
    payload: Literal["mean", "float32", "byte"] = "mean"
    """What replicas exchange for each direction. mean: they share the direction, and losses are
    averaged; float32: each has its own direction and rows, and sends its derivative; byte: the
    same, as an 8-bit integer with one shared scale."""

    def __post_init__(self):
        if self.directions < 1:
            raise ValueError(f"training.gradients.directions={self.directions} must be at least 1")
        check_epsilon(self.epsilon)

    def compute(
        self, step: Step, state: TrainState, batch: Batch, first_row: Any = 0
    ) -> StepGradients:
        """Return the gradients of one step; see the base class."""
        weight, inputs = prepare(step, state, batch, first_row)
        if self.payload == "mean":
            keys = direction_keys(inputs, jnp.arange(self.directions, dtype=jnp.int32))
            pairs = paired_losses(step, inputs, keys, Ends(self.epsilon))
            slopes = clip_derivatives(step, slopes_of(pairs.total, self.epsilon))
        else:
            slopes, pairs = self._of_workers(step, inputs)
            keys = direction_keys(inputs, jnp.arange(slopes.size, dtype=jnp.int32))
        factors = slopes / self.directions
        grads = noise_sum(table_of(step), state.params, keys, factors)
        return StepGradients(weight, gradients_with(grads, pairs))

    def describe(self, step: Step) -> str:
        """Return the cost of a step in words."""
        del step
        sizes = {"mean": 4 * self.directions, "float32": 4 * self.directions}
        sent = sizes.get(self.payload, self.directions + 4)
        return f"zeroth order: 2 x {self.directions} passes a step, {sent} bytes a worker and step"

    def _of_workers(self, step: Step, inputs: Given) -> tuple[Float[Array, " n"], Losses]:
        """Return the derivatives along all directions of all replicas, and the losses.

        Direction i of worker w has number i * W + w.
        """
        workers = step.execution.mesh.replica if surroundings() == "explicit" else 1
        run = partial(worker_slopes, self, step, workers)
        if workers == 1:
            return run(inputs)
        return region(run, axis=REPLICA, out_specs=PartitionSpec())(inputs)


def check_epsilon(epsilon: float) -> None:
    """Raise ValueError if a distance is not above 0."""
    if not 0.0 < epsilon < float("inf"):
        raise ValueError(f"training.gradients.epsilon={epsilon} must be above 0, and finite")


def direction_keys(inputs: Given, numbers: Int[Array, " n"]) -> Array:
    """Return the keys of the noise of directions, [n].

    Args:
        inputs: Key of the step.
        numbers: Numbers of the directions in the step.
    """
    key = jax.random.fold_in(jax.random.wrap_key_data(inputs.key), 1)
    return jax.vmap(lambda number: jax.random.fold_in(key, number))(numbers)


def slopes_of(totals: Float[Array, "n 2"], epsilon: float) -> Float[Array, " n"]:
    """Return the derivatives along directions.

    Args:
        totals: Losses at the positive and the negative distance.
        epsilon: The distance.
    """
    return (totals[:, 0] - totals[:, 1]) / (2.0 * epsilon)


def clip_derivatives(step: Step, slopes: Float[Array, " n"]) -> Float[Array, " n"]:
    """Return derivatives along directions limited to [-clip, clip]."""
    if step.clip is None:
        return slopes
    return jnp.clip(slopes, -step.clip, step.clip)


def paired_losses(step: Step, inputs: Given, keys: Array, ends: Ends) -> Losses:
    """Return the losses of all rows at both ends of directions that all replicas share, [n 2].

    Args:
        step: What is evaluated.
        inputs: Parameters and rows.
        keys: PRNG keys of the noise of each direction, [n].
        ends: Points along a direction.
    """
    replicas = step.execution.mesh.replica if surroundings() == "explicit" else 1
    data = jax.random.key_data(keys)
    if replicas % 2:
        return jax.lax.map(partial(_both_ends, step, inputs, ends), data)
    halves = partial(_in_halves, step, ends, replicas)
    return region(halves, axis=REPLICA, out_specs=PartitionSpec())(inputs, data)


def _in_halves(step: Step, ends: Ends, replicas: int, inputs: Given, data: Array) -> Losses:
    """Return the losses at both ends of directions in a region over replicas."""
    place = jax.lax.axis_index(REPLICA)
    parts = _rows_of_half(inputs.parts, place, replicas)
    local = dataclasses.replace(inputs, parts=parts)
    return jax.lax.map(partial(_one_end, step, local, ends, place, replicas), data)


def end_sums(
    step: Step, inputs: Given, data: Array, scale: Float[Array, ""], draw: Draw = normal
) -> Sums:
    """Return the sums of one pass at a distance along a direction, of which this is key data."""
    key = jax.random.wrap_key_data(data)
    view = noise_view(table_of(step), step.model.scans, key, scale, draw)
    return summed_pass(step, inputs, view)


def _both_ends(step: Step, inputs: Given, ends: Ends, data: Array) -> Losses:
    """Return the losses at both ends of a direction, [2 ...]."""

    def one(scale: Float[Array, ""]) -> Losses:
        return losses_of(step, inputs, end_sums(step, inputs, data, scale, ends.draw))

    return jax.lax.map(one, jnp.asarray([ends.epsilon, -ends.epsilon], jnp.float32))


def _rows_of_half(parts: MicroBatch, place: Int[Array, ""], replicas: int) -> MicroBatch:
    """Return the rows of a replica and of the one at its place in the other half."""
    half = replicas // 2
    partners = [(i, (i + half) % replicas) for i in range(replicas)]

    def both(local: Array) -> Array:
        remote = jax.lax.ppermute(local, REPLICA, partners)
        first, second = (
            jnp.where(place < half, *pair) for pair in ((local, remote), (remote, local))
        )
        return jnp.concatenate([first, second])

    return jax.tree.map(both, parts)


def _one_end(
    step: Step,
    inputs: Given,
    ends: Ends,
    place: Int[Array, ""],
    replicas: int,
    data: Array,
) -> Losses:
    """Return the losses at both ends of a direction, [2 ...]; each half computes one."""
    is_first = place < replicas // 2
    scale = jnp.where(is_first, jnp.float32(ends.epsilon), jnp.float32(-ends.epsilon))
    sums = end_sums(step, inputs, data, scale, ends.draw)
    # Losses of weights are equal in a half; the others are sums over its rows.
    share = jax.tree.map(lambda x: x / (replicas // 2), sums.losses)
    sums = dataclasses.replace(sums, losses=share)

    def at_its_end(x: Array) -> Array:
        none = jnp.zeros_like(x)
        return jnp.stack([jnp.where(is_first, x, none), jnp.where(is_first, none, x)])

    ends_sums = sum_over(REPLICA, jax.tree.map(at_its_end, sums))
    apart = [jax.tree.map(lambda x, end=end: x[end], ends_sums) for end in range(2)]
    losses = [losses_of(step, inputs, sums) for sums in apart]
    return jax.tree.map(lambda *x: jnp.stack(x), *losses)


def worker_slopes(
    config: SPSAConfig, step: Step, workers: int, inputs: Given
) -> tuple[Float[Array, " n"], Losses]:
    """Return the derivatives along the directions of all workers, and the losses of all rows.

    Args:
        config: Directions and payload.
        step: What is evaluated.
        workers: Number of workers; one outside a region.
        inputs: Parameters, and the rows of this worker.
    """
    place = jax.lax.axis_index(REPLICA) if workers > 1 else jnp.int32(0)
    numbers = jnp.arange(config.directions, dtype=jnp.int32) * workers + place

    def one(data: Array) -> Losses:
        def end(scale: Float[Array, ""]) -> Losses:
            sums = end_sums(step, inputs, data, scale)
            return losses_of(step, inputs, sums, 1.0 / workers)

        return jax.lax.map(end, jnp.asarray([config.epsilon, -config.epsilon], jnp.float32))

    directional = jax.lax.map(one, jax.random.key_data(direction_keys(inputs, numbers)))
    slopes = clip_derivatives(step, slopes_of(directional.total, config.epsilon))
    shared = exchange_derivatives(slopes, config.payload, workers)
    if workers > 1:
        directional = sum_over(REPLICA, directional)
    return shared.reshape(-1), directional


def exchange_derivatives(
    slopes: Float[Array, " n"], payload: Literal["mean", "float32", "byte"], workers: int
) -> Float[Array, "n W"]:
    """Return the derivatives of all workers, as they arrive.

    Args:
        slopes: Derivatives of this worker.
        payload: How they travel.
        workers: Number of workers; 1 outside a region.
    """

    def gather(x: Array) -> Array:
        return jax.lax.all_gather(x, REPLICA, axis=1) if workers > 1 else x[:, None]

    if payload != "byte":
        return gather(slopes)
    largest = jnp.max(jnp.abs(slopes))
    largest = jax.lax.pmax(largest, REPLICA) if workers > 1 else largest
    scale = jnp.where(largest > 0.0, largest / LEVELS, 1.0)
    return gather(jnp.round(slopes / scale).astype(jnp.int8)).astype(jnp.float32) * scale
