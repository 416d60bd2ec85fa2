# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Specs for the parameters of any JAX model, from names and shapes (Redco, arXiv 2310.16355).

The mesh has two Auto axes, (data, tensor). Biases, gains and all other vectors are replicated.
Matrices [..., inputs, outputs] are split:

    attention      projections to queries, keys and values by outputs, the output projection by
                   inputs: between the two, each device has whole heads.
    other layers   alternately, within one module: by outputs, then by inputs. Names take
                   precedence: up, gate, wi, in by outputs; down, wo, out by inputs.

A pair of layers then needs one sum over the tensor axis, after the second. Tables of embeddings are
split by their rows, the vocabulary, and output heads by their outputs. A matrix whose dimension is
not divisible is replicated. Optimiser states are laid out as their parameters.

Redco takes the last dimension that divides. Here arrays of three dimensions in attention, [inputs,
heads, width] and [heads, width, outputs], are split by heads, where the last one would cut each
head; and no other dimension than that of the rule is taken, as it would need a sum of its own.
Leading dimensions, of a stack of layers or experts, are not split.

Names and shapes do not show how many heads a matrix [inputs, heads * width] has (with fewer than
devices, heads are cut: correct but slow), that such matrices are stacked, or that a table is not
one of tokens. Use `overrides` for those.

To add a name: an entry in OUTPUTS, INPUTS, ROWS or WHOLE.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from sharding.axes import DATA, TENSOR
from sharding.topology import device_array

# Words of a module's name, split at underscores, digits kept: "q_proj", "fc_in", "wi_0", "lm_head".
OUTPUTS = {
    "q",
    "k",
    "v",
    "query",
    "key",
    "value",
    "qkv",
    "up",
    "gate",
    "wi",
    "in",
    "fc1",
    "w1",
    "w3",
    "head",
}
INPUTS = {"o", "out", "output", "down", "wo", "fc2", "w2"}
ROWS = {"embed", "embedding", "embeddings", "wte", "shared"}
WHOLE = {"bias", "position", "positions", "wpe", "router"}
# Names of leaves that are the matrix of the module around them.
_LEAVES = {"kernel", "weight", "w", "embedding"}


def foreign_mesh(*, tensor: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Return an Auto mesh (data, tensor) for a model that states no shardings.

    Args:
        tensor: Devices that share each layer; the others share the batch.
        devices: Devices of the mesh; None: all devices of all processes.

    Raises:
        ValueError: `tensor` does not divide the devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    if tensor < 1 or len(devices) % tensor:
        divisors = [n for n in range(1, len(devices) + 1) if len(devices) % n == 0]
        raise ValueError(
            f"tensor={tensor} must divide the {len(devices)} devices: choose one of"
            f" {', '.join(map(str, divisors))}"
        )
    sizes = {DATA: len(devices) // tensor, TENSOR: tensor}
    array = device_array(sizes, devices, slice_axis=DATA, ring_axes=())
    return Mesh(array, (DATA, TENSOR), axis_types=(AxisType.Auto,) * 2)


def foreign_specs(
    params: Any, tensor: int, *, overrides: Mapping[str, PartitionSpec] | None = None
) -> Any:
    """Return a tree of PartitionSpec by the two rules.

    Args:
        params: Tree of arrays, or of anything with a shape.
        tensor: Devices of the tensor axis.
        overrides: {regular expression: spec}; the first that is found in a path ("layers/0/q/w")
            decides for it.

    Raises:
        ValueError: An override that no path matches, or that does not fit the array.
    """
    overrides = dict(overrides or {})
    leaves, structure = jax.tree_util.tree_flatten_with_path(params)
    paths = [tuple(_word(key) for key in keys) for keys, _ in leaves]
    unmatched = set(overrides)
    turns: dict[tuple[str, ...], int] = {}
    specs = []
    for path, (_, leaf) in zip(paths, leaves, strict=True):
        shape = tuple(np.shape(leaf))
        pattern = next((e for e in overrides if re.search(e, "/".join(path))), None)
        if pattern is None:
            specs.append(_by_rule(path, shape, tensor, turns))
        else:
            unmatched.discard(pattern)
            _check_fits("/".join(path), shape, overrides[pattern], tensor)
            specs.append(overrides[pattern])
    if unmatched:
        near = ", ".join("/".join(path) for path in paths[:3])
        raise ValueError(
            f"overrides[{min(unmatched)!r}] is found in no path of the parameters: they are called"
            f" {near} and so on"
        )
    return jax.tree.unflatten(structure, specs)


def _by_rule(
    path: tuple[str, ...],
    shape: tuple[int, ...],
    tensor: int,
    turns: dict[tuple[str, ...], int],
) -> PartitionSpec:
    """Return the spec of one matrix; `turns` counts the unnamed layers of each module."""
    module = path[:-1] if path and path[-1].lower() in _LEAVES else path
    near = [set(re.split(r"[^a-z0-9]+", name.lower())) for name in module[-2:]]
    path_words = near[-1] if near else set()
    if len(shape) < 2 or set().union(*near) & WHOLE:
        return PartitionSpec()
    has_heads = len(shape) > 2 and any("att" in name.lower() for name in path)
    outputs, inputs = (-2, -3) if has_heads else (-1, -2)
    if path_words & ROWS or path[-1].lower() == "embedding":
        dim = 0
    elif path_words & INPUTS:
        dim = inputs
    elif path_words & OUTPUTS:
        dim = outputs
    else:
        turn = turns.get(module[:-1], 0)
        turns[module[:-1]] = turn + 1
        dim = inputs if turn % 2 else outputs
    dim %= len(shape)
    if shape[dim] % tensor:
        return PartitionSpec()
    return PartitionSpec(*(TENSOR if d == dim else None for d in range(len(shape))))


def _word(key: Any) -> str:
    """Return the name of a dict key, an index or an attribute."""
    return str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key))))


def _check_fits(path: str, shape: tuple[int, ...], spec: PartitionSpec, tensor: int) -> None:
    if len(spec) > len(shape):
        raise ValueError(
            f"overrides: {spec} has {len(spec)} entries, and {path} has {len(shape)} dimensions"
        )
    for size, entry in zip(shape, spec, strict=False):
        names = (entry,) if isinstance(entry, str) else tuple(entry or ())
        parts = math.prod(tensor if name == TENSOR else 1 for name in names)
        if size % parts:
            raise ValueError(
                f"overrides: {path} has a dimension of {size}, which must be divisible by"
                f" tensor={tensor} to be split by {spec}"
            )
