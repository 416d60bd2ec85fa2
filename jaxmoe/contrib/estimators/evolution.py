# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Evolution strategies with perturbations of low rank (EGGROLL, arXiv 2511.16652).

    E      = B A^T / sqrt(r),   (B, A) = one normal draw [inputs + outputs, r]      per pair
    f      = -loss(w + sign sigma E),   the two members of a pair have opposite signs
    score  = (f - mean) / sqrt(variance + 1e-5),   over all members, or within groups of pairs
    gradient = -sqrt(n) mean_i(score_i sign_i sigma E_i)                  over n members

A vector has independent noise. The factor 1 / sigma^2 of the exact estimate is left to the
learning rate, as in the source. Members are computed one after another, through a view that makes
one layer's perturbed weights at a time; n losses are all that devices exchange. Scores have no
scale, so that training.clip must be None.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.contrib.estimators.noise import noise_sum
from jaxmoe.contrib.estimators.passes import check_forward, gradients_with, prepare, table_of
from jaxmoe.contrib.estimators.spsa import Ends, direction_keys, paired_losses
from jaxmoe.data.batch import Batch
from jaxmoe.declarations import MatrixAxes
from jaxmoe.training.estimators.base import Gradients, StepGradients
from jaxmoe.training.state import TrainState

if TYPE_CHECKING:
    from jaxmoe.training.step import Step

VARIANCE = 1e-5
"""Number added to the variance of the fitness."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EvolutionConfig(Gradients):
    """Evolution strategies with perturbations of low rank (EGGROLL)."""

    name: ClassVar[str] = "evolution"
    clips: ClassVar[Literal["norm", "projection", "nothing"]] = "nothing"
    is_backward: ClassVar[bool] = False
    brings: ClassVar[Mapping[str, Any]] = {"training.clip": None}

    population: int = 16
    """Members per step, in pairs of opposite sign; each takes one forward pass."""
    sigma: float = 1e-2
    """Standard deviation of a perturbation."""
    rank: int = 1
    """Rank of the perturbation of a matrix."""
    groups: int = 1
    """Equal groups of pairs within which the fitness is standardised."""

    def __post_init__(self):
        for field in ("rank", "groups"):
            if (value := getattr(self, field)) < 1:
                raise ValueError(f"training.gradients.{field}={value} must be at least 1")
        if self.population < 2 or self.population % (2 * self.groups):
            raise ValueError(
                f"training.gradients.population={self.population} must be a multiple of 2 x"
                f" training.gradients.groups={self.groups}, since members come in pairs"
            )
        if not 0.0 < self.sigma < float("inf"):
            raise ValueError(f"training.gradients.sigma={self.sigma} must be above 0, and finite")

    def compute(
        self, step: Step, state: TrainState, batch: Batch, first_row: Any = 0
    ) -> StepGradients:
        """Return the gradients of one step; see the base class."""
        weight, inputs = prepare(step, state, batch, first_row)
        draw = partial(low_rank, self.rank)
        keys = direction_keys(inputs, jnp.arange(self.population // 2, dtype=jnp.int32))
        pairs = paired_losses(step, inputs, keys, Ends(self.sigma, draw))
        factors = pair_factors(pairs.total, self.sigma, self.groups)
        grads = noise_sum(table_of(step), state.params, keys, factors, draw)
        return StepGradients(weight, gradients_with(grads, pairs))

    @property
    def num_passes(self) -> float:
        """Cost of a step in forward passes."""
        return float(self.population)

    def check(self, step: Step) -> None:
        """Refuse what forward passes of a view cannot compute; see `check_forward`."""
        check_forward(step)

    def describe(self, step: Step) -> str:
        """Return the cost of a step in words."""
        del step
        return (
            f"evolution: {self.population} passes a step, perturbations of rank {self.rank},"
            f" {4 * self.population} bytes a step"
        )


def low_rank(
    rank: int, key: Array, shape: tuple[int, ...], matrix: MatrixAxes | None
) -> Float[Array, ...]:
    """Return noise of unit variance in the shape of a parameter of one layer.

    Args:
        rank: Rank of each matrix.
        key: PRNG key.
        shape: Shape of the parameter.
        matrix: Input and output dimensions; None for a vector, which has independent noise.
    """
    if matrix is None:
        return jax.random.normal(key, shape, jnp.float32)
    inputs, outputs = (tuple(dim % len(shape) for dim in side) for side in matrix)
    batch_dims = tuple(dim for dim in range(len(shape)) if dim not in inputs + outputs)
    order = (*batch_dims, *inputs, *outputs)
    sizes = [math.prod(shape[dim] for dim in dims) for dims in (inputs, outputs)]
    batch = tuple(shape[dim] for dim in batch_dims)
    normals = jax.random.normal(key, (*batch, sum(sizes), rank), jnp.float32)
    first = normals[..., : sizes[0], :]
    second = normals[..., sizes[0] :, :]
    product = jnp.einsum("...ir,...or->...io", first, second, preferred_element_type=jnp.float32)
    product_of_shape = (product / math.sqrt(rank)).reshape(tuple(shape[dim] for dim in order))
    return jnp.transpose(product_of_shape, [order.index(dim) for dim in range(len(shape))])


def pair_factors(totals: Float[Array, "n 2"], sigma: float, groups: int = 1) -> Float[Array, " n"]:
    """Return the factor on the perturbation of each pair in the gradient.

    Args:
        totals: Losses of the members, the positive one of each pair first.
        sigma: Standard deviation of a perturbation.
        groups: Groups of pairs within which the fitness is standardised.
    """
    fitness = -totals.reshape(groups, -1)
    apart = fitness - jnp.mean(fitness, axis=1, keepdims=True)
    deviation = jnp.sqrt(jnp.mean(apart * apart, axis=1, keepdims=True) + VARIANCE)
    scores = (apart / deviation).reshape(totals.shape)
    size = totals.size
    return -math.sqrt(size) / size * sigma * (scores[:, 0] - scores[:, 1])
