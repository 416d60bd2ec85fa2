# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Which dimensions of a parameter form its matrix, for optimisers that see matrices.

`matrix_axes` of an optimiser is one of

    (-2, -1)                        a pair for every parameter: input and output
    ((-3,), (-2, -1))               the same with several dimensions on a side
    {"q": ((-3,), (-2, -1)), ...}   a tree like the parameters, with such pairs as leaves;
                                    `table.tree(lambda row: row.declaration.matrix)` makes one

Our kernels are (in, out): x @ W. Every other dimension counts matrices: layers, experts.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax

from jaxmoe.parameters import Dims


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Matrix:
    """The dimensions of one parameter, counted from 0."""

    inputs: Dims
    outputs: Dims
    batch: Dims
    """The others, ascending."""
    fan_in: int
    fan_out: int


def is_axes(node: Any) -> bool:
    """Whether a node is a pair of dimensions, or of tuples of them."""
    return isinstance(node, tuple) and len(node) == 2 and all(map(_is_side, node))


def matrices_of(params: Any, matrix_axes: Any, optimizer: str) -> Any:
    """The `Matrix` of every parameter, as a tree like the parameters.

    Args:
        params: arrays; nodes that an optax mask left out stay.
        matrix_axes: see above.
        optimizer: who asks, for errors.

    Raises:
        ValueError: a vector, or dimensions that the parameter does not have; names it.
    """
    if is_axes(matrix_axes):
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: _resolve(path, matrix_axes, leaf, optimizer), params
        )
    return jax.tree_util.tree_map_with_path(
        lambda path, axes, leaf: _resolve(path, axes, leaf, optimizer),
        matrix_axes,
        params,
        is_leaf=lambda node: node is None or is_axes(node),
    )


def spelled(path: Any) -> str:
    """Names from the root, joined by '/'."""
    return jax.tree_util.keystr(path, simple=True, separator="/") or "the parameter"


def _is_side(side: Any) -> bool:
    dims = side if isinstance(side, tuple) and side else (side,)
    return all(isinstance(dim, int) for dim in dims)


def _resolve(path: Any, axes: Any, leaf: Any, optimizer: str) -> Matrix:
    shape = leaf.shape
    if axes is None or len(shape) < 2:
        raise ValueError(
            f"{optimizer} moves matrices, and {spelled(path)} of shape {shape} is none: give it to"
            " adamw, with optax.partition({'adamw': adamw(...), ...}, labels)"
        )
    sides = [side if isinstance(side, tuple) else (side,) for side in axes]
    given = [dim for side in sides for dim in side]
    ndim = len(shape)
    in_range = all(-ndim <= dim < ndim for dim in given)
    if not in_range or len({dim % ndim for dim in given}) < len(given):
        raise ValueError(
            f"{spelled(path)} of shape {shape} has no matrix at the axes {axes}: give different"
            f" dimensions between {-ndim} and {ndim - 1}"
        )
    inputs, outputs = (tuple(dim % ndim for dim in side) for side in sides)
    return Matrix(
        inputs=inputs,
        outputs=outputs,
        batch=tuple(dim for dim in range(ndim) if dim not in inputs + outputs),
        fan_in=math.prod(shape[dim] for dim in inputs),
        fan_out=math.prod(shape[dim] for dim in outputs),
    )
