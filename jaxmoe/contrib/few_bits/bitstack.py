# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Stores matrices as sums of small blocks, of which any number may be kept (BitStack).

    R = W s                                    s: norm of the activations of each input of W
    W s ~ sum_b S_b (A_b B_b)                  S_b = sign(R), +1 at 0;  A_b B_b ~ |R| of rank r
    R <- R - S_b (A_b B_b)                     after each block, which stores bits and float16

The matrices are those that other formats round (`jaxmoe.models.quantize`). A block is one term for
one matrix of one layer, and for all of its experts. The blocks of all layers have one order, in
which every prefix is a model: first blocks of all matrices, then the second ones by the measured
loss of the model with that block, and so on (arXiv 2410.23918, section 3).

It is a storage format: a run that has it is loaded as floating weights, and no kernel multiplies
with the blocks.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Float16, Int32, UInt8

from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.quantize import channels_shape
from jaxmoe.models.weight_storage import WeightStorage
from jaxmoe.parameters import ParameterSpec, ParameterTable
from sharding.mesh import named_shardings

SMALLEST_SCALE = 1e-3
"""Smallest scale of an input, where the mean of the inputs is 1."""


# Not checked at run time: tree functions also fill records with shapes, specs and tracers.
@typing.no_type_check
@struct.dataclass
class Blocks:
    """Blocks of the layers of one parameter, sorted by place."""

    signs: UInt8[Array, "b *G packed"] | Any
    """Signs of inputs times outputs, 8 to the byte; a bit is 1 for +1."""
    left: Float16[Array, "b *G m r"] | Any
    """Factor of the inputs."""
    right: Float16[Array, "b *G r n"] | Any
    """Factor of the outputs."""
    layers: Int32[Array, " b"] | Any
    """Layer that a block belongs to."""
    places: Int32[Array, " b"] | Any
    """Place of a block among the blocks of all parameters."""


@typing.no_type_check
@struct.dataclass
class BitStack:
    """Parameter as a sum of blocks."""

    scales: Float[Array, "L *G m"] | Any
    """Factors of the inputs, by which the sum is divided."""
    blocks: Blocks | None
    """The blocks; None without any."""


def stacked_rows(table: ParameterTable) -> dict[str, ParameterSpec]:
    """Return the rows of the parameters that are stored in blocks, by path.

    Args:
        table: Parameters of the model.
    """
    return {row.path: row for row in table if channels_shape(row) is not None}


def stacked_shape(row: ParameterSpec) -> tuple[int, ...]:
    """Return the shape [L *G m n] of a parameter in blocks: layers, experts, inputs, outputs.

    Args:
        row: Row of the parameter in the table.
    """
    channels = channels_shape(row)
    assert channels is not None  # of `stacked_rows`
    layers = () if row.declaration.is_stacked else (1,)
    return (*layers, *channels, row.size // math.prod(channels))


def block_bytes(shape: Sequence[int], rank: int) -> int:
    """Return the bytes of one block.

    Args:
        shape: Result of `stacked_shape`.
        rank: Largest inner width of the factors.
    """
    _, *groups, m, n = shape
    rank = min(rank, m, n)
    numbers = 2 * 4  # layer and place
    return math.prod(groups) * (-(-m * n // 8) + 2 * rank * (m + n)) + numbers


def scales_of(squares: Float[np.ndarray, "*G m"]) -> Float[np.ndarray, "*G m"]:
    """Return the scales of inputs, with a mean of about 1.

    Args:
        squares: Sums of the squared activations of each input.
    """
    norms = np.sqrt(squares)
    mean = norms.mean(axis=-1, keepdims=True)
    return np.where(mean > 0.0, norms / np.where(mean > 0.0, mean, 1.0), 1.0) + SMALLEST_SCALE


def decompose(
    matrix: Float[Array, "*G m n"], scales: Float[Array, "*G m"], *, count: int, rank: int
) -> tuple[Blocks, Float[Array, " b"]]:
    """Return the blocks of the matrices of one layer, and the norms of what they leave.

    Args:
        matrix: Matrices.
        scales: Factors of the inputs.
        count: Number of blocks.
        rank: Largest inner width of the factors.

    Returns:
        Blocks whose layers and places are 0, and the Frobenius norm of the scaled residual after
        each, divided by that of the scaled matrices.
    """
    *groups, m, n = matrix.shape
    rank = min(rank, m, n)
    scaled = matrix.astype(jnp.float32) * scales.astype(jnp.float32)[..., None]

    def one(residual: Array, _: None) -> tuple[Array, Any]:
        is_positive = residual >= 0.0
        u, s, v = jnp.linalg.svd(jnp.abs(residual), full_matrices=False)
        root = jnp.sqrt(s[..., :rank])
        row_factor = (u[..., :rank] * root[..., None, :]).astype(jnp.float16)
        right = (root[..., None] * v[..., :rank, :]).astype(jnp.float16)
        signs = jnp.packbits(is_positive.reshape(*groups, m * n), axis=-1)
        residual = residual - _term(signs, row_factor, right)
        return residual, (signs, row_factor, right, jnp.linalg.norm(residual.reshape(-1)))

    _, (signs, row_factor, right, norms) = jax.lax.scan(one, scaled, None, length=count)
    none = jnp.zeros(count, jnp.int32)
    blocks = Blocks(signs=signs, left=row_factor, right=right, layers=none, places=none)
    norm = jnp.linalg.norm(scaled.reshape(-1))
    return blocks, norms / jnp.where(norm > 0.0, norm, 1.0)


def _term(
    signs: UInt8[Array, "*G packed"],
    row_factor: Float16[Array, "*G m r"],
    right: Float16[Array, "*G r n"],
) -> Float[Array, "*G m n"]:
    """Return the matrices of one block."""
    size = jnp.matmul(
        row_factor.astype(jnp.float32),
        right.astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    bits = jnp.unpackbits(signs, axis=-1, count=math.prod(size.shape[-2:]))
    return jnp.where(bits.reshape(size.shape) > 0, size, -size)


def expand(row: ParameterSpec, stack: BitStack, dtype: Any) -> Float[Array, ...]:
    """Return a parameter as a floating array.

    Args:
        row: Row of the parameter in the table.
        stack: Its blocks.
        dtype: Dtype of the array.
    """
    shape = stacked_shape(row)
    total = jnp.zeros(shape, jnp.float32)
    if (blocks := stack.blocks) is not None:

        def add(total: Array, block: Blocks) -> tuple[Array, None]:
            term = _term(block.signs, block.left, block.right)
            return total.at[block.layers].add(term), None

        total, _ = jax.lax.scan(add, total, blocks)
    return (total / stack.scales.reshape(shape[:-1])[..., None]).reshape(row.shape).astype(dtype)


def add_block(
    value: Float[Array, ...], row: ParameterSpec, stack: BitStack, number: Any
) -> Float[Array, ...]:
    """Return a floating parameter with one more block.

    Args:
        value: The parameter.
        row: Its row in the table.
        stack: Its blocks.
        number: Index of the block among them.
    """
    shape = stacked_shape(row)
    block = jax.tree.map(lambda leaf: leaf[number], stack.blocks)
    term = _term(block.signs, block.left, block.right)
    scales = stack.scales.reshape(shape[:-1])[block.layers]
    total = (
        value.reshape(shape).at[block.layers].add((term / scales[..., None]).astype(value.dtype))
    )
    return total.reshape(value.shape)


def prefix(stack: BitStack, count: int) -> BitStack:
    """Return a parameter with those of its blocks that are among the first of all parameters.

    Args:
        stack: The parameter.
        count: Number of blocks of all parameters.
    """
    if stack.blocks is None:
        return stack
    num_kept = int(np.sum(np.asarray(stack.blocks.places) < count))
    blocks = jax.tree.map(lambda leaf: leaf[:num_kept], stack.blocks) if num_kept else None
    return dataclasses.replace(stack, blocks=blocks)


def sort_blocks(
    of_layers: Mapping[tuple[str, int], Blocks], order: Sequence[tuple[str, int]]
) -> dict[str, Blocks]:
    """Return the blocks of each parameter with their layers and places.

    Args:
        of_layers: Blocks of each path and layer, in the order in which they were split off.
        order: Path and layer of each block of all parameters.
    """
    seen: dict[tuple[str, int], int] = dict.fromkeys(of_layers, 0)
    blocks_by_owner: dict[str, list[Blocks]] = {}
    for place, owner in enumerate(order):
        path, layer = owner
        block = jax.tree.map(lambda leaf, i=seen[owner]: leaf[i], of_layers[owner])
        moved = dataclasses.replace(block, layers=jnp.int32(layer), places=jnp.int32(place))
        blocks_by_owner.setdefault(path, []).append(moved)
        seen[owner] += 1
    return {
        path: jax.tree.map(lambda *x: jnp.stack(x), *moved)
        for path, moved in blocks_by_owner.items()
    }


def abstract_stacks(
    table: ParameterTable, arrays: Mapping[str, Mapping[str, Any]], dtype: Any, mesh: Mesh
) -> Any:
    """Return shapes, dtypes and layout of parameters in blocks, the target of a restore.

    Args:
        table: Parameters of the model.
        arrays: Shapes and dtypes in the manifest of the checkpoint, by path.
        dtype: Dtype of the parameters that stay floating.
        mesh: Mesh of the layout; every device has all blocks.
    """

    def part(path: str) -> jax.ShapeDtypeStruct:
        array = arrays[path]
        replicated = NamedSharding(mesh, PartitionSpec())
        return jax.ShapeDtypeStruct(tuple(array["shape"]), array["dtype"], sharding=replicated)

    rows = stacked_rows(table)

    def one(row: ParameterSpec) -> Any:
        if row.path not in rows:
            where = named_shardings(row.spec, mesh)
            return jax.ShapeDtypeStruct(row.shape, dtype, sharding=where)
        path = f"params/{row.path}"
        blocks = None
        if f"{path}/blocks/signs" in arrays:
            names = ("signs", "left", "right", "layers", "places")
            blocks = Blocks(**{name: part(f"{path}/blocks/{name}") for name in names})
        return BitStack(scales=part(f"{path}/scales"), blocks=blocks)

    return table.tree(one)


def expanded_params(table: ParameterTable, params: Any, dtype: Any, mesh: Mesh) -> Any:
    """Return parameters in blocks as floating arrays, laid out on the mesh.

    Args:
        table: Parameters of the model.
        params: Parameters of which some are in blocks.
        dtype: Dtype of the arrays.
        mesh: Mesh of the layout.
    """

    rows = stacked_rows(table)

    def one(row: ParameterSpec, stored: Any) -> Array:
        if row.path not in rows:
            return stored
        where = named_shardings(row.spec, mesh)
        return jax.jit(lambda stack: expand(row, stack, dtype), out_shardings=where)(stored)

    with jax.set_mesh(mesh):
        return jax.tree.map(one, table.tree(lambda row: row), params)


@dataclasses.dataclass(frozen=True, slots=True)
class BitStackWeights(WeightStorage):
    """Sums of blocks of signs, which are expanded when they have been read."""

    name: ClassVar[str] = "bitstack"

    def target(
        self,
        table: ParameterTable,
        execution: ExecutionConfig,
        mesh: Mesh,
        arrays: Callable[[], Mapping[str, Mapping[str, Any]]],
    ) -> Any:
        """Return the target of the blocks that the checkpoint has."""
        return abstract_stacks(table, arrays(), execution.precision.parameter_dtype, mesh)

    def floating(self, table: ParameterTable, params: Any, dtype: Any, mesh: Mesh) -> Any:
        """Return the parameters with blocks expanded."""
        return expanded_params(table, params, dtype, mesh)
