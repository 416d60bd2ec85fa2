# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""MKOR: gradients of dense matrices between inverse factors of rank-one averages (2306.01685).

    abar, gbar   mean input and mean output gradient of a matrix over the tokens of a step
    J            = (1 / c) [J - (1 - c) / (c + (1 - c) v' J v)  J v v' J],   v = abar or gbar
    direction    = J_in G J_out, rescaled to the norm of G

The formula is the exact inverse of the average c L + (1 - c) v v', which stays positive definite.
Every `interval` steps the factors are updated, after the step has used them; the first step is
therefore along the gradient. A factor with a number above `largest` moves to 0.9 J + 0.1 I.

AdamW takes the directions, as it takes the gradients of all other parameters: embedding, head,
norms, routers and routed experts. The factors of a matrix of m inputs and n outputs are m^2 + n^2
numbers for each layer, whole on every device. The switch to first order of MKOR-H is not here: its
criterion is not published.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from flax import traverse_util
from jaxtyping import Array, Float, Int

from jaxmoe.contrib.mkor.probes import Statistics, mean_gradients, mean_inputs, probed_rows
from jaxmoe.declarations import MatrixAxes
from jaxmoe.optim.adamw import ADAM, AdamWFields, adamw_group
from jaxmoe.optim.groups import GroupMembers, GroupTraits
from jaxmoe.optim.steps import MeasuringTransformation
from jaxmoe.parameters import Group, ParameterSpec
from sharding.constrain import lie_at, surroundings


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MKORConfig(AdamWFields):
    """AdamW, with the gradients of dense matrices between inverse factors (MKOR)."""

    name: ClassVar[str] = "mkor"
    groups: ClassVar[Mapping[Group, GroupTraits]] = {"adamw": ADAM}

    decay: float = 0.95
    """Decay rate of the averages whose inverses the factors are."""
    interval: int = 10
    """Steps between updates of the factors."""
    largest: float = 2.0
    """Largest number in a factor, above which it moves towards the identity."""

    def __post_init__(self):
        AdamWFields.__post_init__(self)
        if not 0.0 < self.decay < 1.0:
            raise ValueError(f"optimizer.decay={self.decay} must lie between 0 and 1")
        if self.interval < 1:
            raise ValueError(f"optimizer.interval={self.interval} must be at least 1")
        if not self.largest > 1.0:
            raise ValueError(f"optimizer.largest={self.largest} must be above 1, that of a unit")

    def transformation(self, members: GroupMembers) -> optax.GradientTransformation:
        """Return MKOR and AdamW for the group."""
        rows = probed_rows(members.table)
        mkor = scale_by_mkor(rows, decay=self.decay, interval=self.interval, largest=self.largest)
        return ProbingTransformation(*optax.chain(mkor, adamw_group(members, self)))


class ProbingTransformation(MeasuringTransformation):
    """A transformation whose update takes `stats`, the gradients of the probes of a step."""

    __slots__ = ()

    backward: ClassVar[str] = "probed"


class MKORState(NamedTuple):
    """State of `scale_by_mkor`."""

    count: Int[Array, ""]
    inputs: Any
    """Inverse factors of the inputs [L m m], a tree of the matrices."""
    outputs: Any
    """Inverse factors of the output gradients [L n n]."""


def scale_by_mkor(
    rows: Sequence[ParameterSpec],
    *,
    decay: float = 0.95,
    interval: int = 10,
    largest: float = 2.0,
) -> optax.GradientTransformationExtraArgs:
    """Return the transformation from gradients to directions of MKOR.

    Its update takes `stats`, the gradients of probes; see `jaxmoe.contrib.mkor.probes`.

    Args:
        rows: Matrices that are preconditioned; the gradients of all others stay.
        decay: Decay rate of the averages.
        interval: Steps between updates of the factors.
        largest: Largest number in a factor.
    """

    def units(side: Literal[0, 1]) -> Any:
        sizes = {row.path: (row.shape[0], row.declaration.fan(side)) for row in rows}
        return _nest(
            {
                path: jnp.broadcast_to(jnp.eye(size), (layers, size, size))
                for path, (layers, size) in sizes.items()
            }
        )

    def init(params: Any) -> MKORState:
        del params
        return MKORState(jnp.zeros((), jnp.int32), units(0), units(1))

    def update(
        updates: Any, state: MKORState, params: Any = None, *, stats: Statistics | None = None, **_
    ) -> tuple[Any, MKORState]:
        del params
        if stats is None:
            raise ValueError(
                "optimizer:mkor needs the statistics of the matrices in every update: give"
                " update(..., stats=), as jaxmoe.make_train_step does"
            )
        flat = _flat(updates)
        inputs = _flat(state.inputs)
        outputs = _flat(state.outputs)
        for row in rows:
            factors = inputs[row.path], outputs[row.path]
            flat[row.path] = directions(flat[row.path], *factors, row.declaration.matrix)
        is_due = state.count % interval == 0

        def move(factors: dict[str, Array], mean: Any) -> Any:
            return _nest(
                {
                    path: jnp.where(
                        is_due, update_factors(old, mean(stats, path), decay, largest), old
                    )
                    for path, old in factors.items()
                }
            )

        state = MKORState(
            state.count + 1,
            move(inputs, mean_inputs),
            move(outputs, mean_gradients),
        )
        return _nest(flat), state

    # Its protocol has any further arguments, of which this one reads `stats`.
    return optax.GradientTransformationExtraArgs(init, cast(Any, update))


def _flat(tree: Any) -> dict[str, Any]:
    return traverse_util.flatten_dict(tree, sep="/")


def _nest(flat: dict[str, Any]) -> Any:
    return traverse_util.unflatten_dict(flat, sep="/")


def update_factors(
    inverse: Float[Array, "L n n"], mean: Float[Array, "L n"], decay: float, largest: float
) -> Float[Array, "L n n"]:
    """Return the inverse factors after one more mean.

    Args:
        inverse: Inverse factors.
        mean: New means.
        decay: Decay rate of the average.
        largest: Largest number in a factor, above which it moves towards the identity.
    """
    precise = jax.lax.Precision.HIGHEST
    moved = jnp.einsum("lij,lj->li", inverse, mean, precision=precise)
    along = jnp.sum(mean * moved, axis=-1)
    factor = (1.0 - decay) / (decay + (1.0 - decay) * along)
    outer = moved[:, :, None] * moved[:, None, :]
    update = (inverse - factor[:, None, None] * outer) / decay
    is_large = jnp.max(jnp.abs(update), axis=(1, 2), keepdims=True) > largest
    return jnp.where(is_large, 0.9 * update + 0.1 * jnp.eye(inverse.shape[-1])[None], update)


def directions(
    gradient: Float[Array, "L ..."],
    inputs: Float[Array, "L m m"],
    outputs: Float[Array, "L n n"],
    matrix: MatrixAxes | None,
) -> Float[Array, "L ..."]:
    """Return the gradient of each layer's matrix between its factors, with its norm.

    Args:
        gradient: Gradient of a stack of matrices, inputs before outputs.
        inputs: Inverse factors of the inputs.
        outputs: Inverse factors of the outputs.
        matrix: Input and output dimensions.
    """
    assert matrix is not None and len(matrix[0]) + len(matrix[1]) == gradient.ndim - 1
    function = partial(_between, len(matrix[0]))
    if surroundings() != "explicit":
        return function(gradient, inputs, outputs)
    names = jax.sharding.get_abstract_mesh().axis_names
    spec = jax.typeof(gradient).sharding.spec
    return lie_at(function, axes=names, specs=spec)(gradient, inputs, outputs)


def _between(num_inputs: int, gradient: Array, inputs: Array, outputs: Array) -> Array:
    sizes = math.prod(gradient.shape[1 : 1 + num_inputs]), -1
    flat = gradient.reshape(gradient.shape[0], *sizes)
    product = jnp.einsum("lij,ljo->lio", inputs, flat, preferred_element_type=jnp.float32)
    product = jnp.einsum("lio,lop->lip", product, outputs, preferred_element_type=jnp.float32)

    def norm(x: Array) -> Array:
        return jnp.sqrt(jnp.sum(x * x, axis=(1, 2), keepdims=True))

    scale = norm(flat) / jnp.maximum(norm(product), 1e-30)
    return (product * scale).reshape(gradient.shape)
