# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Cuts parameters into the fragments that are exchanged at different steps.

Stacked layers are cut in strides: layer l is in fragment l mod P. Every other parameter, and every
stack that P does not divide, lies whole in the fragment that has the fewest numbers so far.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from flax import traverse_util
from jaxtyping import Array

Arrays = Mapping[str, Array]
"""{path: array}."""


SEPARATOR = ":"
"""Stands between the names of a path, in place of the slash, which no saved name may hold."""


def flat(tree: Any) -> dict[str, Any]:
    """Return parameters as {path: array}."""
    return traverse_util.flatten_dict(tree, sep=SEPARATOR)


def nest(arrays: Mapping[str, Any]) -> Any:
    """Return {path: array} as nested parameters."""
    return traverse_util.unflatten_dict(dict(arrays), sep=SEPARATOR)


class Leaf(NamedTuple):
    """What a method knows about a parameter."""

    path: str
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    """Logical axis of each dimension."""
    role: str
    is_stacked: bool
    """Whether the first dimension counts layers."""


class TrainingFacts(NamedTuple):
    """What a method is built from."""

    leaves: Sequence[Leaf]
    """Trained parameters."""
    workers: int
    """Number of workers."""
    steps: int
    """Steps of the run."""


def is_small(leaf: Leaf) -> bool:
    """Return whether a parameter is never compressed: of routers, norms, states, residuals,
    adapters."""
    is_small = leaf.role.startswith(("router", "constant", "connection"))
    return is_small or leaf.role in ("norm", "state", "adapter")


@dataclasses.dataclass(frozen=True, slots=True)
class Fragment:
    """Some layers of stacks, and some whole parameters."""

    number: int
    count: int
    """Number of fragments."""
    strided: tuple[str, ...]
    """Paths of stacks of which the fragment has every `count`-th layer."""
    whole_paths: tuple[str, ...]
    """Paths of parameters that lie whole in the fragment."""

    def take(self, arrays: Arrays, leading: int = 0) -> dict[str, Array]:
        """Return the fragment's part of the parameters.

        Args:
            arrays: {path: array}.
            leading: Dimensions before those of the parameter, such as that of workers.
        """

        def layers(x: Array) -> Array:
            return jax.lax.index_in_dim(self._cut(x, leading), self.number, leading + 1, False)

        parts = {path: layers(arrays[path]) for path in self.strided}
        return parts | {path: arrays[path] for path in self.whole_paths}

    def put(self, arrays: Arrays, parts: Arrays, leading: int = 0) -> dict[str, Array]:
        """Return the parameters with the fragment's part replaced.

        Args:
            arrays: {path: array}.
            parts: Result of `take`, changed.
            leading: As for `take`.
        """

        def layers(x: Array, part: Array) -> Array:
            cut = self._cut(x, leading)
            cut = jax.lax.dynamic_update_index_in_dim(cut, part, self.number, leading + 1)
            return cut.reshape(x.shape)

        stacks = {path: layers(arrays[path], parts[path]) for path in self.strided}
        return dict(arrays) | stacks | {path: parts[path] for path in self.whole_paths}

    def shape(self, leaf: Leaf) -> tuple[int, ...]:
        """Return the shape of the fragment's part of a parameter."""
        if leaf.path in self.whole_paths:
            return leaf.shape
        return (leaf.shape[0] // self.count, *leaf.shape[1:])

    def _cut(self, x: Array, leading: int) -> Array:
        """Return the array with its layers as [layers / count, count]."""
        before = x.shape[:leading]
        layers = x.shape[leading]
        after = x.shape[leading + 1 :]
        return x.reshape(*before, layers // self.count, self.count, *after)


def cut_fragments(leaves: Sequence[Leaf], count: int) -> tuple[Fragment, ...]:
    """Return the fragments of a model.

    Args:
        leaves: All parameters.
        count: Number of fragments.

    Raises:
        ValueError: A fragment would be empty.
    """
    strided = []
    sizes = [0] * count
    fragments: list[list[str]] = [[] for _ in range(count)]
    for leaf in leaves:
        if count > 1 and leaf.is_stacked and leaf.shape[0] % count == 0:
            strided.append(leaf.path)
    unstrided = [leaf for leaf in leaves if leaf.path not in strided]
    for leaf in sorted(unstrided, key=lambda leaf: -math.prod(leaf.shape)):
        lightest = sizes.index(min(sizes))
        sizes[lightest] += math.prod(leaf.shape)
        fragments[lightest].append(leaf.path)
    if not strided and not all(fragments):
        raise ValueError(
            f"replicas.fragments={count} leaves a fragment without parameters: choose a divisor of"
            " model.num_layers"
        )
    return tuple(
        Fragment(number, count, tuple(strided), tuple(fragments[number])) for number in range(count)
    )
