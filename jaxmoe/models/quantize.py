# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Quantises parameters for inference: the matrices of a trained model as QuantizedArrays.

    w ~ values * scales        one scale for 128 inputs of each output

The matrices of attention, feed-forwards and experts (`QUANTIZED_ROLES`) are rounded, nearly all of
the parameters. The others stay as trained:

    router, head gates, gains    few parameters, with a large effect on tokens and heads
    embedding                    looked up, not multiplied
    head                         its errors appear in the logits directly; may be the embedding

Layers accept such parameters in place of floating ones; `execution.precision.weights` decides what
activations are rounded to. Values are rounded to nearest, from the weights alone, without data.

To round another role: its name in `QUANTIZED_ROLES` of jaxmoe/models/quantize.py; its layer must
declare it with `declare_matrix`.
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

from jaxmoe.declarations import Role
from jaxmoe.parameters import ParameterSpec, ParameterTable
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
"""Largest number of inputs that share a scale; a divisor of the dimension is used."""
SMALLEST_BLOCK: Final = 16
"""Smallest number of inputs that share a scale; scales of fewer would cost the memory saved."""

# Dimensions that are cut where a matrix is stored, and whole where it is used.
_GATHERED = (ax.EMBED, ax.EXPERT_EMBED)


def quantize_parameter(
    row: ParameterSpec, value: Float[Array, ...], form: WeightFormat
) -> Float[Array, ...] | QuantizedArray:
    """Quantise one parameter if its role is in `QUANTIZED_ROLES`.

    Args:
        row: Row of the parameter in the table.
        value: Floating value.
        form: Key of `jaxmoe.precision.QUANTIZED_WEIGHTS`.

    Raises:
        ValueError: Another format.
    """
    if form not in QUANTIZED_WEIGHTS:
        raise ValueError(f"weights={form!r} is none of {', '.join(QUANTIZED_WEIGHTS)}")
    if (axis := scaled_axis(row)) is None:
        return value
    block = _block_size(value.shape[axis])
    return quantize(value, QUANTIZED_WEIGHTS[form][0], axis=axis, block_size=block)


def _block_size(size: int) -> int | None:
    """Return the largest divisor that may share a scale; None for all where it is too small."""
    block = max(d for d in range(1, min(size, LARGEST_BLOCK) + 1) if size % d == 0)
    return block if block >= SMALLEST_BLOCK else None


def scaled_axis(row: ParameterSpec) -> int | None:
    """Return the dimension along which a parameter is scaled; None if it stays floating.

    It is the last of those that a product sums over: H of [N H D] with N and H summed.
    """
    matrix = row.declaration.matrix
    if row.declaration.role not in QUANTIZED_ROLES or matrix is None:
        return None
    return matrix[0][-1]


def abstract_params(
    table: ParameterTable, form: WeightFormat, dtype: Any, rules: LogicalAxisRules, mesh: Mesh
) -> Any:
    """Return shapes, dtypes and layout of quantised parameters, the target of a restore.

    Args:
        table: Parameters of the model.
        form: Key of `jaxmoe.precision.QUANTIZED_WEIGHTS`.
        dtype: Dtype of the parameters that stay floating.
        rules: Rules from logical axes to mesh axes.
        mesh: Mesh of the layout.

    Raises:
        ValueError: A mesh that cuts a matrix within a block that shares a scale.
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
    """Return the spec of a parameter, or of its scales, which are fewer along one dimension."""
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
    """Return the bytes of all arrays, two numbers of 4 bits to the byte.

    Args:
        tree: Tree of arrays.
    """
    leaves = jax.tree.leaves(tree)
    return sum(leaf.size * jax.dtypes.itemsize_bits(leaf.dtype) for leaf in leaves) // 8


def largest_error(
    value: Float[Array, ...], rounded: Float[Array, ...]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Return the largest |error| of a rounded array, and the largest |value|.

    Args:
        value: Array as trained.
        rounded: Array rounded and converted back.
    """
    wide = value.astype(jnp.float32)
    return jnp.max(jnp.abs(rounded - wide), initial=0.0), jnp.max(jnp.abs(wide), initial=0.0)
