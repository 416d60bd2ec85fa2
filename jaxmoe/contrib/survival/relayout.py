# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Fills the parts of a state that one layout needs from the pieces of another.

    parts = Parts(target)
    for pieces, words in saved:         one saved process after the other
        parts.fill(pieces, words)
    state = parts.state()

A process holds its own parts, and the words of one saved process at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import traverse_util

from jaxmoe.contrib.survival.parity import Words
from jaxmoe.contrib.survival.pieces import Index, Piece, index_of, leaves_of
from jaxmoe.state_tree import SEPARATOR, unpack


class Parts:
    """Parts of a state on the devices of this process.

    Args:
        target: State with the arrays and shardings wanted; shapes suffice.
    """

    def __init__(self, target: Any):
        self._target, self._leaves = target, leaves_of(target)
        self._parts: dict[str, dict[Index, np.ndarray]] = {}
        for path, leaf in self._leaves.items():
            indices = leaf.sharding.addressable_devices_indices_map(leaf.shape).values()
            indices_local = {index_of(index, leaf.shape) for index in indices if index is not None}
            self._parts[path] = {
                index: np.zeros(_shape(index), leaf.dtype) for index in indices_local
            }

    def fill(self, pieces: Sequence[Piece], buffer: Words) -> None:
        """Copy what these parts share with the pieces of one saved process.

        Args:
            pieces: Pieces, in the layout that was saved.
            buffer: Words of that process.
        """
        for piece in pieces:
            data = piece.values(buffer)
            for index, part in self._parts[piece.path].items():
                shared = [
                    (max(target[0], source[0]), min(target[1], source[1]))
                    for target, source in zip(index, piece.index, strict=True)
                ]
                if all(first < last for first, last in shared):
                    part[_within(shared, index)] = data[_within(shared, piece.index)]

    def state(self) -> Any:
        """Return the state; the pieces of all saved processes must have been filled in."""
        arrays = {}
        for path, leaf in self._leaves.items():

            def part(index: Any, path: str = path, shape: Any = leaf.shape) -> np.ndarray:
                return self._parts[path][index_of(index, shape)]

            arrays[path] = jax.make_array_from_callback(leaf.shape, leaf.sharding, part)
        return unpack(traverse_util.unflatten_dict(arrays, sep=SEPARATOR), self._target)


def _shape(index: Index) -> tuple[int, ...]:
    return tuple(last - first for first, last in index)


def _within(shared: Sequence[tuple[int, int]], index: Index) -> tuple[slice, ...]:
    """Return the place of a box of the whole array within one of its parts."""
    return tuple(
        slice(first - start, last - start)
        for (first, last), (start, _) in zip(shared, index, strict=True)
    )
