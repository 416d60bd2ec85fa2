# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Resolves which dimensions of a parameter form its matrix.

`matrix_axes` of an optimiser is one of

    (-2, -1)                        a pair for every parameter: input and output
    ((-3,), (-2, -1))               the same with several dimensions on a side
    {"q": ((-3,), (-2, -1)), ...}   a tree like the parameters, with such pairs as leaves;
                                    `table.tree(lambda row: row.declaration.matrix)` makes one

What can be read as a tree like the parameters is one: where they are a tuple of two arrays, two
pairs in a tuple are one of each. Kernels are (in, out), as in x @ W. Every other dimension counts
matrices: layers, experts. A parameter of fewer than two dimensions, or with None in the tree, is no
matrix: `beside` gives it to another optimiser. Where None stands for the tree, those of exactly two
dimensions are matrices, as for `optax.contrib.muon`. None in place of a parameter stays None.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
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
        params: Arrays; None and nodes masked by optax stay.
        matrix_axes: Pair or tree of pairs; see the module's docstring.
        optimizer: Name of the optimiser, for errors.

    Raises:
        ValueError: A parameter is a vector or lacks a dimension; or `matrix_axes` is neither a pair
            nor a tree like the parameters.
    """

    def resolve(path: Any, axes: Any, leaf: Any) -> Matrix:
        return _resolve(path, axes, leaf, optimizer)

    return map_axes(resolve, params, matrix_axes, optimizer)


def map_axes(
    function: Callable[[Any, Any, Any], Any], params: Any, matrix_axes: Any, optimizer: str
) -> Any:
    """Return `function(path, axes, parameter)` of all, as a tree like the parameters.

    Args:
        function: Receives the path, the pair or None, and the array.
        params: Arrays; None and nodes masked by optax stay.
        matrix_axes: Pair or tree of pairs; see the module's docstring.
        optimizer: Name of the optimiser, for errors.

    Raises:
        ValueError: `matrix_axes` is neither a pair nor a tree like the parameters.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(params, is_leaf=_is_empty)
    pairs = _pairs_of_tree(matrix_axes, structure)
    if pairs is None and not is_axes(matrix_axes):
        raise ValueError(
            f"matrix_axes={matrix_axes!r} of {optimizer} is neither a pair of dimensions, as"
            f" (-2, -1), nor a tree of pairs like the parameters{_difference(matrix_axes, leaves)}"
        )
    if pairs is None:
        pairs = [matrix_axes] * len(leaves)
    results = [
        leaf if _is_empty(leaf) else function(path, None if _is_masked(axes) else axes, leaf)
        for (path, leaf), axes in zip(leaves, pairs, strict=True)
    ]
    return structure.unflatten(results)


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

    def label(path: Any, axes: Any, leaf: Any) -> str:
        del path
        return _MATRICES if len(leaf.shape) >= 2 and axes is not None else _OTHERS

    def plain_label(leaf: Any) -> Any:
        return leaf if _is_masked(leaf) else (_MATRICES if len(leaf.shape) == 2 else _OTHERS)

    def labels(params: Any) -> Any:
        if matrix_axes is None:
            return jax.tree.map(plain_label, params, is_leaf=_is_masked)
        return map_axes(label, params, matrix_axes, optimizer)

    stays_finite = all(isinstance(part, FiniteTransformation) for part in (of_matrices, of_others))
    parts = optax.partition({_MATRICES: of_matrices, _OTHERS: of_others}, labels)
    return standard_promotion(parts, stays_finite=stays_finite)


def stacked_axes(matrix_axes: Any) -> Any:
    """Return the pair or tree of pairs that the transformation of matrices needs.

    Args:
        matrix_axes: Pair, tree of pairs, or None for matrices of exactly two dimensions.
    """
    return (-2, -1) if matrix_axes is None else matrix_axes


def _pairs_of_tree(matrix_axes: Any, structure: Any) -> list[Any] | None:
    """Return the leaves of a tree of pairs like the parameters; None if it is no such tree."""
    try:
        leaves = structure.flatten_up_to(matrix_axes)
    except (TypeError, ValueError):
        return None
    return leaves if all(map(_is_axes_leaf, leaves)) else None


def spell_path(path: Any) -> str:
    """Return the names from the root, joined by '/'."""
    return jax.tree_util.keystr(path, simple=True, separator="/") or "the parameter"


def _is_masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)


def _is_empty(node: Any) -> bool:
    return node is None or _is_masked(node)


def _is_axes_leaf(node: Any) -> bool:
    return _is_empty(node) or is_axes(node)


def _difference(matrix_axes: Any, params: Any) -> str:
    """Return the first parameter that only one of two trees has; empty if both have the same."""
    paths = jax.tree_util.tree_leaves_with_path(matrix_axes, is_leaf=_is_axes_leaf)
    of_axes, of_params = ([spell_path(path) for path, _ in tree] for tree in (paths, params))
    if missing := [path for path in of_params if path not in of_axes]:
        return f": it has no pair for {missing[0]}"
    further = [path for path in of_axes if path not in of_params]
    return f": there is no parameter {further[0]}" if further else ""


def _is_side(side: Any) -> bool:
    dims = side if isinstance(side, tuple) and side else (side,)
    return all(isinstance(dim, int) for dim in dims)


def _resolve(path: Any, axes: Any, leaf: Any, optimizer: str) -> Matrix:
    shape = leaf.shape
    if axes is None or len(shape) < 2:
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
