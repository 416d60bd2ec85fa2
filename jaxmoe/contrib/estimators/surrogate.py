# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Gradients of a surrogate of the loss, fitted to forward passes (FZooS, arXiv 2308.04077).

    loss(x) ~ w . phi(x),   phi_i(x) = sqrt(2 / M) cos(v_i . x / l + b_i)     M random features
    w_k = argmin sum_j (w . d phi_j - d L_kj)^2 + ridge |w - w' / K|^2        of worker k of K
    d f_j = f(x + e u_j) - f(x - e u_j),   w = sum_k w_k,   gradient = w . dphi/dx

v_i are normal and b_i uniform, made anew from the key of the run, so that phi is that of a Gaussian
kernel of length l. Each worker has directions u_j and rows of its own, and sends its M weights; the
parts of the loss add up. The trajectory enters through w', the weights after the step before, which
the ridge holds on to where new passes say nothing: the source keeps the passes themselves, and
corrects local steps, of which there are none here. Differences on the same rows carry no noise of
rows. The gradient lies in the span of the v_i, all held at a time: this is for adapters.
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxmoe.contrib.estimators import passes
from jaxmoe.contrib.estimators.noise import noise_sum
from jaxmoe.contrib.estimators.passes import Given, Losses, table_of
from jaxmoe.contrib.estimators.spsa import check_epsilon, direction_keys, end_sums
from jaxmoe.data.batch import Batch
from jaxmoe.parameters import ParameterTable
from jaxmoe.training.estimators.base import Gradients, StepGradients
from jaxmoe.training.state import TrainState
from sharding.axes import REPLICA
from sharding.constrain import place_at, place_like, surroundings
from sharding.regions import region, sum_over

if TYPE_CHECKING:
    from jaxmoe.training.step import Step

LIMIT: Final = 100_000
"""Largest number of trained values."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SurrogateConfig(Gradients):
    """Gradient of a surrogate of the loss, for at most 100,000 trained values (FZooS)."""

    name: ClassVar[str] = "surrogate"
    clips: ClassVar[Literal["norm", "projection", "nothing"]] = "norm"
    is_backward: ClassVar[bool] = False

    features: int = 256
    """Random features of the surrogate, whose weights each worker sends."""
    queries: int = 8
    """Directions of a worker per step, each with two forward passes."""
    epsilon: float = 1e-3
    """Distance of each pass from the parameters, in standard deviations of the noise."""
    length: float = 10.0
    """Length of the kernel, in distances of a pass from the parameters."""
    ridge: float = 1e-2
    """Weight of the previous surrogate, in mean squares of the new differences."""

    def __post_init__(self):
        for field in ("features", "queries"):
            if (value := getattr(self, field)) < 1:
                raise ValueError(f"training.gradients.{field}={value} must be at least 1")
        for field in ("length", "ridge"):
            if not 0.0 < (value := getattr(self, field)) < math.inf:
                raise ValueError(f"training.gradients.{field}={value} must be above 0, and finite")
        check_epsilon(self.epsilon)

    def init(self, table: ParameterTable) -> Float[Array, " M"]:
        """Return the weights of the features, all zero."""
        del table
        return jnp.zeros((self.features,), jnp.float32)

    def compute(
        self, step: Step, state: TrainState, batch: Batch, first_row: Any = 0
    ) -> StepGradients:
        """Return the gradients of one step; see the base class."""
        before = self.own_state(state)
        weight, inputs = passes.prepare(step, state, batch, first_row)
        table = table_of(step)
        workers = step.execution.mesh.replica if surroundings() == "explicit" else 1
        x, unravel = _flat(table, state.params)
        scale = self.length * self.epsilon * math.sqrt(x.size)
        vectors, angles = basis(state.rng, self.features, x.size)
        phases = _dot(vectors, x / scale) + angles
        keys = direction_keys(inputs, jnp.arange(self.queries * workers, dtype=jnp.int32))

        def turn(data: Array) -> Float[Array, " M"]:
            key = jax.random.wrap_key_data(data)[None]
            u, _ = _flat(table, noise_sum(table, state.params, key, jnp.ones(1)))
            return _dot(vectors, u * (self.epsilon / scale))

        data = jax.random.key_data(keys)
        rows = difference_rows(phases, jax.lax.map(turn, data))
        run = partial(_fit, self, step, workers)
        if workers > 1:
            run = region(run, axis=REPLICA, out_specs=PartitionSpec())
        weights, losses = run(inputs, data, rows, before)
        grads = unravel(gradient(vectors, phases, weights) / scale)
        grads = jax.tree.map(place_like, grads, table.select_trained(state.params))
        return StepGradients(weight, passes.gradients_with(grads, losses), state=weights)

    @property
    def num_passes(self) -> float:
        """Cost of a step in forward passes."""
        return 2.0 * self.queries

    def check(self, step: Step) -> None:
        """Refuse large models, and what forward passes of a view cannot compute."""
        passes.check_forward(step)
        size = sum(row.size for row in table_of(step).trained_rows)
        if size > LIMIT:
            raise ValueError(
                f"training.gradients:surrogate holds {self.features} vectors in the size of what is"
                f" trained, at most {LIMIT} values, and there are {size}: train an adapter, such as"
                " model.adapter:lora, or choose training.gradients:spsa"
            )

    def describe(self, step: Step) -> str:
        """Return the cost of a step in words."""
        del step
        return (
            f"zeroth order: 2 x {self.queries} passes a step, {4 * self.features} bytes a worker"
            f" and step (weights of {self.features} features)"
        )


def basis(key: Array, features: int, size: int) -> tuple[Float[Array, "M d"], Float[Array, " M"]]:
    """Return the vectors and the angles of features of this many values, from the run's key."""
    first, second = jax.random.split(jax.random.fold_in(key, 0xFEA7))
    angles = jax.random.uniform(second, (features,), maxval=2.0 * math.pi)
    return jax.random.normal(first, (features, size), jnp.float32), angles


def difference_rows(phases: Float[Array, " M"], turns: Float[Array, "n M"]) -> Float[Array, "n M"]:
    """Return features at x + e u minus those at x - e u, from the phases at x and their changes."""
    return -2.0 * math.sqrt(2.0 / phases.size) * jnp.sin(phases)[None] * jnp.sin(turns)


def fit(
    before: Float[Array, " M"], rows: Float[Array, "n M"], seen: Float[Array, " n"], ridge: float
) -> Float[Array, " M"]:
    """Return the weights near those before that explain differences of losses by rows."""
    gram = _dot(rows, rows.T)
    level = ridge * jnp.mean(jnp.diagonal(gram))
    square = gram + jnp.where(level > 0.0, level, 1.0) * jnp.eye(len(seen), dtype=jnp.float32)
    return before + _dot(rows.T, jnp.linalg.solve(square, seen - _dot(rows, before)))


def gradient(
    vectors: Float[Array, "M d"], phases: Float[Array, " M"], weights: Float[Array, " M"]
) -> Float[Array, " d"]:
    """Return the gradient of the surrogate, times the length of the kernel."""
    return _dot(-math.sqrt(2.0 / phases.size) * jnp.sin(phases) * weights, vectors)


def _fit(
    config: SurrogateConfig,
    step: Step,
    workers: int,
    inputs: Given,
    keys: Array,
    rows: Float[Array, "n M"],
    before: Float[Array, " M"],
) -> tuple[Float[Array, " M"], Losses]:
    """Return the weights after the passes of all workers, and the losses of all rows."""
    place = jax.lax.axis_index(REPLICA) if workers > 1 else jnp.int32(0)
    query_ids: Int[Array, " q"] = jnp.arange(config.queries, dtype=jnp.int32) * workers + place

    def one(data: Array) -> Losses:
        def end(scale: Float[Array, ""]) -> Losses:
            return passes.losses_of(
                step, inputs, end_sums(step, inputs, data, scale), 1.0 / workers
            )

        return jax.lax.map(end, jnp.asarray([config.epsilon, -config.epsilon], jnp.float32))

    slopes = jax.lax.map(one, keys[query_ids])
    weights = fit(
        before / workers, rows[query_ids], slopes.total[:, 0] - slopes.total[:, 1], config.ridge
    )
    return sum_over(REPLICA, (weights, slopes)) if workers > 1 else (weights, slopes)


def _dot(x: Array, y: Array) -> Array:
    return jnp.dot(x, y, precision="highest", preferred_element_type=jnp.float32)


def _flat(table: ParameterTable, tree: Any) -> tuple[Float[Array, " d"], Any]:
    """Return trained values as one f32 vector, and the function back to a tree."""
    trained = table.select_trained(tree)
    spec = PartitionSpec()
    return ravel_pytree(jax.tree.map(lambda x: place_at(x.astype(jnp.float32), spec), trained))
