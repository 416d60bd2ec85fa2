# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Derivatives along directions from a fixed pool of seeds (FedKSeed, arXiv 2312.06353).

    p      = (L(w + epsilon z_k) - L(w - epsilon z_k)) / (2 epsilon),   k drawn from K seeds
    s_k    = s_k + p / q                                 after each accepted step of q draws
    w(t)   = w(0) - learning_rate * sum_k s_k z_k        with SGD at a constant rate, no decay

The sums s_k [K] are the whole difference between two models that began equally: 16,384 bytes for
4,096 seeds, whatever the size of the model and the number of steps. `replay` rebuilds the
parameters from them. They agree with those of the run up to the rounding of another order of sums.

With `choice` weighted (FedKSeed-Pro) a seed is drawn with the probability

    softmax(minmax(mean over its history of |clip(p, -1000, 1000)|)),   history beginning with 0
"""

from __future__ import annotations

import dataclasses
import typing
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Key

from jaxmoe.contrib.estimators.noise import noise_sum
from jaxmoe.contrib.estimators.passes import gradients_with, prepare, table_of
from jaxmoe.contrib.estimators.spsa import (
    DirectionalDescent,
    Ends,
    check_epsilon,
    clip_derivatives,
    paired_losses,
    slopes_of,
)
from jaxmoe.data.batch import Batch
from jaxmoe.parameters import ParameterTable
from jaxmoe.training.estimators.base import StepGradients
from jaxmoe.training.state import TrainState
from sharding.constrain import place_like

if TYPE_CHECKING:
    from jaxmoe.training.step import Step

LARGEST = 1000.0
"""Largest derivative that counts in the history of a seed."""


# Not checked at run time: tree functions also fill records with shapes, specs and tracers.
@typing.no_type_check
@struct.dataclass
class SeedSums:
    """What a pool of seeds carries from step to step."""

    sums: Float[Array, " K"]
    """Sum of the derivatives along each seed's noise, each divided by the draws of its step."""
    magnitudes: Float[Array, " K"] | None = None
    """Sums of the clipped absolute derivatives; None where seeds are drawn uniformly."""
    counts: Float[Array, " K"] | None = None
    """Draws of each seed; None where seeds are drawn uniformly."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SeedPoolConfig(DirectionalDescent):
    """Derivatives along directions from a fixed pool of seeds (FedKSeed)."""

    name: ClassVar[str] = "seed_pool"
    optimizers: ClassVar[tuple[str, ...]] = ("sgd",)

    seeds: int = 4096
    """Seeds in the pool."""
    directions: int = 1
    """Seeds drawn per step, each with two forward passes."""
    epsilon: float = 5e-4
    """Distance of each pass from the parameters, in standard deviations of the noise."""
    choice: Literal["uniform", "weighted"] = "uniform"
    """Probability of a seed: uniform, or weighted by the mean size of its derivatives so far."""

    def __post_init__(self):
        for field in ("seeds", "directions"):
            if (value := getattr(self, field)) < 1:
                raise ValueError(f"training.gradients.{field}={value} must be at least 1")
        check_epsilon(self.epsilon)

    def init(self, table: ParameterTable) -> SeedSums:
        """Return sums of zero."""
        del table

        def zeros() -> Float[Array, " K"]:
            return jnp.zeros((self.seeds,), jnp.float32)

        if self.choice == "uniform":
            return SeedSums(sums=zeros())
        return SeedSums(sums=zeros(), magnitudes=zeros(), counts=zeros())

    def compute(
        self, step: Step, state: TrainState, batch: Batch, first_row: Any = 0
    ) -> StepGradients:
        """Return the gradients of one step; see the base class."""
        sums: SeedSums = self.own_state(state)
        weight, inputs = prepare(step, state, batch, first_row)
        key = jax.random.fold_in(jax.random.wrap_key_data(inputs.key), 2)
        logits = jnp.log(probabilities(sums))
        drawn = jax.random.categorical(key, logits, shape=(self.directions,))
        keys = seed_keys(state.rng, drawn)
        pairs = paired_losses(step, inputs, keys, Ends(self.epsilon))
        slopes = clip_derivatives(step, slopes_of(pairs.total, self.epsilon))
        factors = slopes / self.directions
        grads = noise_sum(table_of(step), state.params, keys, factors)
        return StepGradients(weight, gradients_with(grads, pairs), state=_add(sums, drawn, slopes))

    def describe(self, step: Step) -> str:
        """Return the cost of a step in words."""
        del step
        return (
            f"zeroth order: 2 x {self.directions} passes a step; {self.seeds} sums of"
            f" {4 * self.seeds} bytes are the difference to the initial parameters"
        )


def probabilities(sums: SeedSums) -> Float[Array, " K"]:
    """Return the probability of each seed; see the module's docstring.

    Args:
        sums: State of the pool.
    """
    if sums.magnitudes is None or sums.counts is None:
        return jnp.full_like(sums.sums, 1.0 / sums.sums.size)
    mean = sums.magnitudes / (sums.counts + 1.0)
    low = jnp.min(mean)
    high = jnp.max(mean)
    return jax.nn.softmax((mean - low) / jnp.where(high > low, high - low, 1.0))


def seed_keys(rng: Key[Array, ""], seeds: Any) -> Array:
    """Return the PRNG keys of the noise of seeds, the same in every step.

    Args:
        rng: Key of the run, `TrainState.rng`.
        seeds: Numbers of the seeds, [n].
    """
    pool = jax.random.fold_in(rng, 0x5EED)
    return jax.vmap(lambda seed: jax.random.fold_in(pool, seed))(jnp.asarray(seeds, jnp.uint32))


def replay(
    table: ParameterTable,
    base: Any,
    sums: Float[Array, " K"],
    rng: Key[Array, ""],
    learning_rate: float,
) -> Any:
    """Return the parameters after steps of SGD at a constant rate, from the sums alone.

    Args:
        table: Parameters of the model.
        base: Parameters before the first step.
        sums: `SeedSums.sums` after the last step.
        rng: Key of the run, `TrainState.rng`.
        learning_rate: Rate of all steps, before the multipliers of the roles.
    """
    keys = seed_keys(rng, jnp.arange(sums.shape[0]))
    total = noise_sum(table, base, keys, sums)
    rates = table.select_trained(
        table.tree(lambda row: learning_rate * row.hyper.learning_rate_multiplier)
    )
    moved = jax.tree.map(
        lambda p, z, rate: place_like(p - (rate * z).astype(p.dtype), p),
        table.select_trained(base),
        total,
        rates,
    )
    return table.merge(moved, base)


def _add(pool: SeedSums, drawn: Array, slopes: Float[Array, " n"]) -> SeedSums:
    """Return the state with the derivatives of one step."""
    sums = pool.sums.at[drawn].add(slopes / slopes.size)
    if pool.magnitudes is None or pool.counts is None:
        return SeedSums(sums=sums)
    sizes = jnp.minimum(jnp.abs(slopes), LARGEST)
    return SeedSums(
        sums=sums,
        magnitudes=pool.magnitudes.at[drawn].add(sizes),
        counts=pool.counts.at[drawn].add(1.0),
    )
