# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Means of inputs and output gradients of the dense matrices of the layers.

Matrices of attention and of dense feed-forwards, shared experts included, get probes
(`jaxmoe/contrib/mkor/probed.py`) by a view of the parameters. Embedding, head, routers and routed
experts have none: the rows of an expert are few and their number differs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import jax.numpy as jnp
from flax import traverse_util
from jaxtyping import Array, Float

from jaxmoe.contrib.mkor.probed import ProbedArray, means
from jaxmoe.declarations import Role
from jaxmoe.layers.view import View
from jaxmoe.parameters import ParameterSpec, ParameterTable

PROBED_ROLES: Final[frozenset[Role]] = frozenset(
    ("attention_in", "attention_out", "attention_gate", "mlp_in", "mlp_out")
    + ("shared_in", "shared_out")
)
"""Roles of the matrices that have probes."""
PROBES: Final = "probes"
"""Name of the own parameters of a view with probes."""
TOKENS: Final = "tokens"
"""Name of the number of tokens beside the statistics of the matrices."""

Statistics = dict[str, Any]
"""Sums and counts `{"inputs": [L 2 ...], "outputs": [L 2 ...]}` by path, and `tokens`."""


def probed_rows(table: ParameterTable) -> tuple[ParameterSpec, ...]:
    """Return the rows of the trained matrices that have probes.

    Args:
        table: Parameters of the model.
    """
    return tuple(
        row
        for row in table.trained_rows
        if row.declaration.role in PROBED_ROLES and row.declaration.is_stacked
    )


def zero_probes(rows: Sequence[ParameterSpec]) -> Statistics:
    """Return the probes of matrices, all zeros.

    Args:
        rows: Matrices.
    """

    def of(row: ParameterSpec, side: int) -> Array:
        assert row.declaration.matrix is not None  # the roles are those of matrices
        dims = row.declaration.matrix[side]
        return jnp.zeros((row.shape[0], 2, *(row.shape[dim] for dim in dims)), jnp.float32)

    return {row.path: {"inputs": of(row, 0), "outputs": of(row, 1)} for row in rows}


def probe_view(probes: Statistics, cycles: Sequence[str]) -> View:
    """Return the view of matrices with probes.

    Args:
        probes: Probes by path.
        cycles: Names of the scans over periods of layers.
    """
    arrays: dict[str, Any] = {}
    for path, pair in probes.items():
        scan, *remaining = path.split("/")
        node = arrays.setdefault(scan, {})
        if scan in cycles:
            place, *remaining = remaining
            node = node.setdefault(place, {})
        node.setdefault(PROBES, {})["/".join(remaining)] = pair
    return View(rewrite=_attach, own=arrays)


def _attach(params: dict[str, Any], arrays: Any, part: str) -> dict[str, Any]:
    """Return the parameters of a layer with probes at some of its matrices."""
    del part
    flat: dict[str, Any] = traverse_util.flatten_dict(params, sep="/")
    for path, pair in arrays.get(PROBES, {}).items():
        flat[path] = ProbedArray(values=flat[path], **pair)
    return traverse_util.unflatten_dict(flat, sep="/")


def mean_inputs(statistics: Statistics, path: str) -> Float[Array, "L n"]:
    """Return the mean input of a matrix in each layer.

    Args:
        statistics: Gradients of probes.
        path: Path of the matrix.
    """
    return means(_flat(statistics[path]["inputs"]))


def mean_gradients(statistics: Statistics, path: str) -> Float[Array, "L n"]:
    """Return the mean over tokens of the gradient of a token's loss at the output of a matrix.

    The loss of a step is a mean, so that this is the number of tokens times the mean gradient.

    Args:
        statistics: Gradients of probes, and the number of tokens.
        path: Path of the matrix.
    """
    return means(_flat(statistics[path]["outputs"])) * statistics[TOKENS]


def _flat(probe: Array) -> Array:
    return probe.reshape(*probe.shape[:2], math.prod(probe.shape[2:]))
