# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Resolves which dimensions of a parameter form its matrix.

`matrix_axes` of an optimiser is one of

    (-2, -1)                        a pair for every parameter: input and output
    ((-3,), (-2, -1))               the same with several dimensions on a side
    {"q": ((-3,), (-2, -1)), ...}   a tree like the parameters, with such pairs as leaves;
                                    `table.tree(lambda row: row.declaration.matrix)` makes one

Kernels are (in, out), as in x @ W. Every other dimension counts matrices: layers, experts. A
parameter of fewer than two dimensions, or with None in the tree, is no matrix: `beside` gives it to
another optimiser. Where None stands for the tree, those of exactly two dimensions are matrices, as
for `optax.contrib.muon`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import optax

from jaxmoe.declarations import Dims
from jaxmoe.optim.steps import (
    FiniteTransformation,
    LayerwiseTransformation,
    standard_promotion,
)

_MATRICES = "matrices"
_OTHERS = "others"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Matrix:
    """Matrix dimensions of one parameter, counted from 0."""

    inputs: Dims
    outputs: Dims
    batch: Dims
    """Remaining dimensions, ascending."""
    fan_in: int
    fan_out: int


def is_axes(node: Any) -> bool:
    """Return whether a node is a pair of dimensions, or of tuples of dimensions."""
    return isinstance(node, tuple) and len(node) == 2 and all(map(_is_side, node))


def matrices_of(params: Any, matrix_axes: Any, optimizer: str) -> Any:
    """Return the `Matrix` of every parameter, as a tree like the parameters.

    Args:
        params: Arrays; nodes masked by optax stay.
        matrix_axes: Pair or tree of pairs; see the module's docstring.
        optimizer: Name of the optimiser, for errors.

    Raises:
        ValueError: A parameter is a vector or lacks a dimension; or `matrix_axes` is neither a pair
            nor a tree like the parameters.
    """
    if is_axes(matrix_axes):
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: _resolve(path, matrix_axes, leaf, optimizer), params
        )
    _check_like(params, matrix_axes, optimizer)
    return jax.tree_util.tree_map_with_path(
        lambda path, axes, leaf: _resolve(path, axes, leaf, optimizer),
        matrix_axes,
        params,
        is_leaf=_is_axes_leaf,
    )


def beside(
    of_matrices: optax.GradientTransformation,
    of_others: optax.GradientTransformation,
    matrix_axes: Any,
    optimizer: str,
) -> LayerwiseTransformation:
    """Return the transformation of any tree: of its matrices, and of what is none.

    It is a `FiniteTransformation` if both are.

    Args:
        of_matrices: Transformation of matrices.
        of_others: Transformation of all other parameters.
        matrix_axes: Pair, tree of pairs, or None; see the module's docstring.
        optimizer: Name of the optimiser, for errors.
    """

    def label(axes: Any, leaf: Any) -> Any:
        if _is_masked(leaf):
            return leaf
        is_matrix = len(leaf.shape) >= 2 and axes is not None and not _is_masked(axes)
        return _MATRICES if is_matrix else _OTHERS

    def plain_label(leaf: Any) -> Any:
        return leaf if _is_masked(leaf) else (_MATRICES if len(leaf.shape) == 2 else _OTHERS)

    def labels(params: Any) -> Any:
        if matrix_axes is None:
            return jax.tree.map(plain_label, params, is_leaf=_is_masked)
        if is_axes(matrix_axes):
            return jax.tree.map(lambda leaf: label(matrix_axes, leaf), params, is_leaf=_is_masked)
        _check_like(params, matrix_axes, optimizer)
        return jax.tree.map(label, matrix_axes, params, is_leaf=_is_axes_leaf)

    stays_finite = all(isinstance(part, FiniteTransformation) for part in (of_matrices, of_others))
    parts = optax.partition({_MATRICES: of_matrices, _OTHERS: of_others}, labels)
    return standard_promotion(parts, stays_finite=stays_finite)


def stacked_axes(matrix_axes: Any) -> Any:
    """Return the pair or tree of pairs that the transformation of matrices needs.

    Args:
        matrix_axes: Pair, tree of pairs, or None for matrices of exactly two dimensions.
    """
    return (-2, -1) if matrix_axes is None else matrix_axes


def _check_like(params: Any, matrix_axes: Any, optimizer: str) -> None:
    known, wanted = (
        [spell_path(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)]
        for tree, is_leaf in ((matrix_axes, _is_axes_leaf), (params, _is_masked))
    )
    if known != wanted:
        raise ValueError(
            f"matrix_axes={matrix_axes!r} of {optimizer} is neither a pair of dimensions, as"
            f" (-2, -1), nor a tree of pairs like the parameters{_difference(known, wanted)}"
        )


def spell_path(path: Any) -> str:
    """Return the names from the root, joined by '/'."""
    return jax.tree_util.keystr(path, simple=True, separator="/") or "the parameter"


def _is_masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)


def _is_axes_leaf(node: Any) -> bool:
    return node is None or _is_masked(node) or is_axes(node)


def _difference(known: list[str], wanted: list[str]) -> str:
    """Return the first parameter that only one of two trees has."""
    if missing := [path for path in wanted if path not in known]:
        return f": it has no pair for {missing[0]}"
    return f": there is no parameter {next(path for path in known if path not in wanted)}"


def _is_side(side: Any) -> bool:
    dims = side if isinstance(side, tuple) and side else (side,)
    return all(isinstance(dim, int) for dim in dims)


def _resolve(path: Any, axes: Any, leaf: Any, optimizer: str) -> Matrix | optax.MaskedNode:
    if _is_masked(leaf):
        return leaf
    shape = leaf.shape
    if axes is None or _is_masked(axes) or len(shape) < 2:
        raise ValueError(
            f"{optimizer} moves matrices, and {spell_path(path)} of shape {shape} is none: give"
            f" it to"
            " adamw, with optax.partition({'adamw': adamw(...), ...}, labels)"
        )
    sides = [side if isinstance(side, tuple) else (side,) for side in axes]
    dims = [dim for side in sides for dim in side]
    ndim = len(shape)
    in_range = all(-ndim <= dim < ndim for dim in dims)
    if not in_range or len({dim % ndim for dim in dims}) < len(dims):
        raise ValueError(
            f"{spell_path(path)} of shape {shape} has no matrix at the axes {axes}: give different"
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
