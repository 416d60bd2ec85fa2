# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Quantises parameters for inference: the matrices of a trained model as QuantizedArrays.

    w        ~ values * scales     one scale for 128 inputs of each output
    w[order] ~ values * scales     w4ax: inputs sorted by their largest |activation|, a MixedArray

The matrices of attention, feed-forwards and experts (`QUANTIZED_ROLES`) are rounded, nearly all of
the parameters. The others stay as trained:

    router, head gates, gains    few parameters, with a large effect on tokens and heads
    embedding                    looked up, not multiplied
    head                         its errors appear in the logits directly; may be the embedding

Layers accept such parameters in place of floating ones; `execution.precision.weights` decides what
activations are rounded to. Values are rounded to nearest, from the weights alone; the order of w4ax
is measured on data. A stored [N H D], summed over N and H, holds its rows in that order; each
expert has its own.

To round another role: its name in `QUANTIZED_ROLES` of jaxmoe/models/quantize.py; its layer must
declare it with `declare_matrix`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import jax
import jax.numpy as jnp
from flax import traverse_util
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from jaxmoe.declarations import Role
from jaxmoe.parameters import ParameterSpec, ParameterTable
from jaxmoe.precision import (
    MIXED,
    QUANTIZED_WEIGHTS,
    MixedConfig,
    PrecisionPolicy,
    WeightFormat,
)
from pallas_kernels import MixedArray, QuantizedArray, dequantize, quantize
from pallas_kernels.quantized_matmul.mixed_array import channel_order
from sharding import axes as ax
from sharding.rules import LogicalAxisRules

QUANTIZED_ROLES: Final[frozenset[Role]] = frozenset(
    {
        "attention_in",
        "attention_out",
        "mlp_in",
        "mlp_out",
        "shared_in",
        "shared_out",
        "expert_in",
        "expert_out",
    }
)
LARGEST_BLOCK: Final = 128
"""Largest number of inputs that share a scale; a divisor of the dimension is used."""
SMALLEST_BLOCK: Final = 16
"""Smallest number of inputs that share a scale; scales of fewer would cost the memory saved."""
LEAST_BLOCKS: Final = 8
"""Number of blocks that w4ax prefers to larger ones, so that a few of them may be wide."""

# Dimensions that are cut where a matrix is stored, and whole where it is used.
_GATHERED = (ax.EMBED, ax.EXPERT_EMBED)


def quantize_parameter(
    row: ParameterSpec,
    value: Float[Array, ...],
    form: WeightFormat,
    mixed: MixedConfig | None = None,
    largest: Float[Array, "*G k"] | None = None,
) -> Float[Array, ...] | QuantizedArray | MixedArray:
    """Quantise one parameter if its role is in `QUANTIZED_ROLES`.

    Args:
        row: Row of the parameter in the table.
        value: Floating value.
        form: Key of `jaxmoe.precision.QUANTIZED_WEIGHTS`.
        mixed: Blocks of w4ax; the defaults when None.
        largest: Largest |activation| of each input, of shape `channels_shape`; w4ax needs it.

    Raises:
        ValueError: Another format, w4ax without a measurement, or a block size that does not divide
            the inputs.
    """
    if form not in QUANTIZED_WEIGHTS:
        raise ValueError(f"weights={form!r} is none of {', '.join(QUANTIZED_WEIGHTS)}")
    if (axis := scaled_axis(row)) is None:
        return value
    dtype = QUANTIZED_WEIGHTS[form][0]
    mixed = mixed or MixedConfig()
    if form != MIXED:
        block = _block_size(value.shape[axis], LARGEST_BLOCK)
        return quantize(value, dtype, axis=axis, block_size=block)
    if largest is None:
        raise ValueError(f"{row.path}: {form} needs a measurement of the activations (largest)")
    order = channel_order(largest)
    flat = value.reshape(*order.shape, -1)
    turned = jnp.take_along_axis(flat, order[..., None], axis=-2).reshape(value.shape)
    block = mixed_block_size(row, mixed)
    weights = quantize(turned, dtype, axis=axis, block_size=block)
    blocks = order.shape[-1] // (block or value.shape[axis])
    return MixedArray(weights=weights, order=order, num_wide=mixed.num_wide(blocks))


def dequantize_parameter(
    stored: Float[Array, ...] | QuantizedArray | MixedArray,
) -> Float[Array, ...]:
    """Return the floating values of a parameter as stored.

    Args:
        stored: Result of `quantize_parameter`.
    """
    if isinstance(stored, QuantizedArray):
        return dequantize(stored)
    if not isinstance(stored, MixedArray):
        return stored
    flat = dequantize(stored.weights).reshape(*stored.order.shape, -1)
    places = jnp.argsort(stored.order, axis=-1)
    return jnp.take_along_axis(flat, places[..., None], axis=-2).reshape(stored.shape)


def channels_shape(row: ParameterSpec) -> tuple[int, ...] | None:
    """Return the shape of a measurement per input: batch dimensions, and all inputs in one.

    Args:
        row: Row of the parameter in the table.

    Returns:
        The shape; None if the parameter stays floating.
    """
    matrix = row.declaration.matrix
    if matrix is None or scaled_axis(row) is None:
        return None
    inputs, _ = matrix
    return (*row.shape[: inputs[0]], math.prod(row.shape[d] for d in inputs))


def mixed_block_size(row: ParameterSpec, mixed: MixedConfig) -> int | None:
    """Return the inputs of a matrix that share a scale in w4ax; None for all of the scaled axis.

    Args:
        row: Row of the parameter in the table.
        mixed: Blocks.

    Raises:
        ValueError: A block size that does not divide the inputs.
    """
    axis = scaled_axis(row)
    shape = channels_shape(row)
    assert axis is not None and shape is not None
    size = row.shape[axis]
    if mixed.block_size is None:
        return _block_size(size, min(LARGEST_BLOCK, max(shape[-1] // LEAST_BLOCKS, SMALLEST_BLOCK)))
    block = min(mixed.block_size, size)
    if size % block:
        near = [d for d in range(1, size + 1) if size % d == 0 and d >= min(size, SMALLEST_BLOCK)]
        raise ValueError(
            f"mixed.block_size={mixed.block_size} must divide the {size} inputs of {row.path}:"
            f" choose {' or '.join(map(str, near))}, or leave it out"
        )
    return block


def _block_size(size: int, limit: int) -> int | None:
    """Return the largest divisor that may share a scale; None for all where it is too small."""
    block = max(d for d in range(1, min(size, limit) + 1) if size % d == 0)
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
    table: ParameterTable,
    form: WeightFormat,
    dtype: Any,
    rules: LogicalAxisRules,
    mesh: Mesh,
    mixed: MixedConfig | None = None,
) -> Any:
    """Return shapes, dtypes and layout of quantised parameters, the target of a restore.

    Args:
        table: Parameters of the model.
        form: Key of `jaxmoe.precision.QUANTIZED_WEIGHTS`.
        dtype: Dtype of the parameters that stay floating.
        rules: Rules from logical axes to mesh axes.
        mesh: Mesh of the layout.
        mixed: Blocks of w4ax; the defaults when None.

    Raises:
        ValueError: A mesh that cuts a matrix within a block that shares a scale, or the inputs of a
            matrix that are sorted.
    """

    def one(row: ParameterSpec) -> Any:
        leaves = {"value": jax.ShapeDtypeStruct(row.shape, row.stored_dtype(dtype))}
        if (channels := channels_shape(row)) is not None and form == MIXED:
            _check_uncut(row, rules, mesh.shape)
            leaves["largest"] = jax.ShapeDtypeStruct(channels, jnp.float32)
        parts = jax.eval_shape(partial(quantize_parameter, row, form=form, mixed=mixed), **leaves)

        def place(part: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
            where = NamedSharding(mesh, spec)
            return jax.ShapeDtypeStruct(part.shape, part.dtype, sharding=where)

        def place_matrix(parts: Any) -> Any:
            return jax.tree.map(
                lambda part: place(part, _spec(row, part.shape, rules, mesh.shape)), parts
            )

        if not isinstance(parts, MixedArray):
            return place_matrix(parts)
        batch = row.declaration.axes[: parts.order.ndim - 1]
        order = place(parts.order, rules.resolve((*batch, None)))
        return dataclasses.replace(parts, weights=place_matrix(parts.weights), order=order)

    return table.tree(one)


def quantized_params(
    table: ParameterTable,
    params: Any,
    precision: PrecisionPolicy,
    rules: LogicalAxisRules,
    mesh: Mesh,
) -> Any:
    """Return parameters in the format of the weights, laid out on the mesh.

    Args:
        table: Parameters of the model.
        params: Floating values.
        precision: Format of the weights, other than w4ax.
        rules: Rules from logical axes to mesh axes.
        mesh: Mesh of the layout.
    """
    form = precision.weights
    shapes = abstract_params(table, form, precision.parameter_dtype, rules, mesh)
    flat = traverse_util.flatten_dict(params, sep="/")

    def round_to(flat: Any) -> Any:
        return table.tree(lambda row: quantize_parameter(row, flat[row.path], form))

    with jax.set_mesh(mesh):
        return jax.jit(round_to, out_shardings=jax.tree.map(lambda shape: shape.sharding, shapes))(
            flat
        )


def _check_uncut(row: ParameterSpec, rules: LogicalAxisRules, sizes: Mapping[str, int]) -> None:
    """Refuse a mesh that cuts the inputs of a matrix where it is used.

    Raises:
        ValueError: The mesh cuts them.
    """
    inputs, _ = row.declaration.matrix or ((), ())
    for name in (row.declaration.axes[d] for d in inputs):
        cuts = {axis: sizes[axis] for axis in rules.mesh_axes(name) if sizes[axis] > 1}
        if cuts and name not in _GATHERED:
            spelled = " and ".join(f"mesh.{axis}={size}" for axis, size in cuts.items())
            raise ValueError(
                f"{row.path} is in {MIXED}, whose inputs are sorted over the whole matrix, and"
                f" {spelled} cuts its dimension {name!r}: set mesh.{' and mesh.'.join(cuts)} to 1"
            )


def _spec(
    row: ParameterSpec,
    shape: tuple[int, ...],
    rules: LogicalAxisRules,
    sizes: Mapping[str, int],
) -> PartitionSpec:
    """Return the spec of a parameter, or of its scales, which are fewer along one dimension."""
    names: list[str | None] = []
    for name, length, size in zip(row.declaration.axes, row.shape, shape, strict=True):
        shards = math.prod(sizes[axis] for axis in rules.mesh_axes(name))
        if size == length or size % shards == 0:
            names.append(name)
        elif size == 1 or name in _GATHERED:
            names.append(None)
        else:
            raise ValueError(
                f"{row.path}: {size} blocks of {length // size} inputs share a scale each, and the"
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
