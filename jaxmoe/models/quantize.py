# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Parameters in few bits, for inference: the matrices of a trained model as QuantizedArrays.

    w ~ values * scales        scales: of 128 inputs at a time, for each output

What is rounded are the matrices of attention, feed-forward layers and experts (`QUANTIZED_ROLES`):
nearly all of the parameters. What stays as trained:

    router, gates of heads, gains    few, and a small change of theirs moves whole tokens or heads
    embedding                        is looked up, not multiplied
    head                             its errors are those of the logits, with no layer behind them;
                                     and it may be the embedding

Layers take such parameters in place of floating ones; `execution.precision.weights` says what the
activations are rounded to there. Rounding is to the nearest, from the weights alone: no data is
looked at. Nothing here is trained.

To round another role: a name in QUANTIZED_ROLES, and its layer declares it with `declare_matrix`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from jaxmoe.parameters import ParameterSpec, ParameterTable, Role
from jaxmoe.precision import QUANTIZED_WEIGHTS, WeightFormat
from pallas_kernels import QuantizedArray, quantize
from sharding import axes as ax
from sharding.rules import LogicalAxisRules

QUANTIZED_ROLES: Final[frozenset[Role]] = frozenset(
    {
        *("attention_in", "attention_out", "mlp_in", "mlp_out"),
        *("shared_in", "shared_out", "expert_in", "expert_out"),
    }
)
LARGEST_BLOCK: Final = 128
"""Inputs that share a scale, at most; a divisor of the dimension."""
SMALLEST_BLOCK: Final = 16
"""Inputs that share a scale, at least: scales of fewer would take the room that was gained."""

# Dimensions that are cut where a matrix is stored, and whole where it is used.
_GATHERED = (ax.EMBED, ax.EXPERT_EMBED)


def quantize_params(table: ParameterTable, params: Any, form: WeightFormat) -> Any:
    """The parameters with their matrices in few bits, the others as they are.

    Args:
        table: of the model.
        params: floating, on one device.
        form: a key of `jaxmoe.precision.QUANTIZED_WEIGHTS`.

    Raises:
        ValueError: another format.
    """
    rows = table.tree(lambda row: row)
    return jax.tree.map(partial(quantize_parameter, form=form), rows, params)


def quantize_parameter(
    row: ParameterSpec, value: Float[Array, ...], form: WeightFormat
) -> Float[Array, ...] | QuantizedArray:
    """One parameter, in few bits where its role is among `QUANTIZED_ROLES`.

    Args:
        row: of the table.
        value: floating.
        form: as for `quantize_params`.
    """
    if form not in QUANTIZED_WEIGHTS:
        raise ValueError(f"weights={form!r} is none of {', '.join(QUANTIZED_WEIGHTS)}")
    if (axis := scaled_axis(row)) is None:
        return value
    block = _block_size(value.shape[axis])
    return quantize(value, QUANTIZED_WEIGHTS[form][0], axis=axis, block_size=block)


def _block_size(size: int) -> int | None:
    """The largest divisor that may share a scale; None, all of them, where that is a few."""
    block = max(d for d in range(1, min(size, LARGEST_BLOCK) + 1) if size % d == 0)
    return block if block >= SMALLEST_BLOCK else None


def scaled_axis(row: ParameterSpec) -> int | None:
    """The dimension along which the scales of a parameter lie; None: it stays floating.

    The last of those that a product sums over: of [N H D] with N and H summed it is H.
    """
    matrix = row.declaration.matrix
    if row.declaration.role not in QUANTIZED_ROLES or matrix is None:
        return None
    return matrix[0][-1]


def abstract_params(
    table: ParameterTable, form: WeightFormat, dtype: Any, rules: LogicalAxisRules, mesh: Mesh
) -> Any:
    """Shapes, dtypes and layout of quantised parameters: what a restore is aimed at.

    Args:
        table: of the model.
        form: as for `quantize_params`.
        dtype: of the parameters that stay floating.
        rules: from logical axes to mesh axes.
        mesh: on which they are meant.

    Raises:
        ValueError: a mesh that cuts a matrix within what shares a scale.
    """

    def one(row: ParameterSpec) -> Any:
        shape = jax.ShapeDtypeStruct(row.shape, dtype)
        parts = jax.eval_shape(partial(quantize_parameter, row, form=form), shape)

        def place(part: Any) -> jax.ShapeDtypeStruct:
            where = NamedSharding(mesh, _spec(row, part.shape, rules, mesh.shape))
            return jax.ShapeDtypeStruct(part.shape, part.dtype, sharding=where)

        return jax.tree.map(place, parts)

    return table.tree(one)


def _spec(
    row: ParameterSpec,
    shape: tuple[int, ...],
    rules: LogicalAxisRules,
    sizes: Mapping[str, int],
) -> PartitionSpec:
    """Where a parameter lies, or its scales, which are fewer along one dimension."""
    names: list[str | None] = []
    for name, whole, size in zip(row.declaration.axes, row.shape, shape, strict=True):
        shards = math.prod(sizes[axis] for axis in rules.mesh_axes(name))
        if size == whole or size % shards == 0:
            names.append(name)
        elif size == 1 or name in _GATHERED:
            names.append(None)
        else:
            raise ValueError(
                f"{row.path}: {size} blocks of {whole // size} inputs share a scale each, and the"
                f" mesh cuts the dimension {name!r} into {shards}: set mesh.tensor to a divisor of"
                f" {size}"
            )
    return rules.resolve(names)


def stored_bytes(tree: Any) -> int:
    """Bytes of all arrays, two numbers of 4 bits to the byte.

    Args:
        tree: of arrays.
    """
    leaves = jax.tree.leaves(tree)
    return sum(leaf.size * jax.dtypes.itemsize_bits(leaf.dtype) for leaf in leaves) // 8


def largest_error(
    value: Float[Array, ...], rounded: Float[Array, ...]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The largest |error| of what was rounded, and the largest |value|.

    Args:
        value: as trained.
        rounded: turned back.
    """
    wide = value.astype(jnp.float32)
    return jnp.max(jnp.abs(rounded - wide), initial=0.0), jnp.max(jnp.abs(wide), initial=0.0)
