# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Packs the part of a state that one process holds into 32-bit words, and unpacks it.

    (pieces, ...) = pieces_of(state, groups)    part of the whole arrays, and place in the words
    words  = pack_words(state, pieces)          the bits, copied from the devices
    state  = place_words([(pieces, words)], target)

If several devices of a process hold the same part of an array, it is packed once. The pieces follow
from the shardings alone, so that each process knows those of all others. Every piece begins at a
whole word.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jaxtyping import UInt32

from jaxmoe.state_tree import SEPARATOR, pack, unpack

Index = tuple[tuple[int, int], ...]
"""First index and index after the last, in every dimension of the whole array."""


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """Part of an array, and its place among the words."""

    path: str
    index: Index
    dtype: str
    start: int
    """First word."""
    stop: int
    """Index after the last word."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the part."""
        return tuple(last - first for first, last in self.index)

    def values(self, buffer: UInt32[np.ndarray, " size"]) -> np.ndarray:
        """Return the part from the words of its process, without a copy.

        Args:
            buffer: Words of the process.
        """
        dtype = jnp.dtype(self.dtype)
        size = math.prod(self.shape) * dtype.itemsize
        data = buffer[self.start : self.stop].view(np.uint8)[:size]
        return data.view(dtype).reshape(self.shape)


def pieces_of(
    state: Any, groups: Sequence[Collection[jax.Device]]
) -> tuple[tuple[Piece, ...], ...]:
    """Return the parts of a state that each group of devices holds, each part once.

    Args:
        state: Tree of named arrays.
        groups: Devices of each process.
    """
    group_of = {device: number for number, group in enumerate(groups) for device in group}
    pieces_by_group: list[list[Piece]] = [[] for _ in groups]
    for path, leaf in sorted(leaves_of(state).items()):
        indices: list[set[Index]] = [set() for _ in groups]
        for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
            indices[group_of[device]].add(index_of(index, leaf.shape))
        for pieces, index_set in zip(pieces_by_group, indices, strict=True):
            for index in sorted(index_set):
                start = num_words(pieces)
                size = math.prod(last - first for first, last in index) * leaf.dtype.itemsize
                pieces.append(Piece(path, index, str(leaf.dtype), start, start + -(-size // 4)))
    return tuple(map(tuple, pieces_by_group))


def num_words(pieces: Sequence[Piece]) -> int:
    """Return the number of words of all pieces."""
    return pieces[-1].stop if pieces else 0


def pack_words(state: Any, pieces: Sequence[Piece], size: int) -> UInt32[np.ndarray, " size"]:
    """Return the bits of the pieces, copied to the host and padded with zeros.

    Args:
        state: Tree of named arrays.
        pieces: Pieces from `pieces_of` on addressable devices.
        size: Number of words to return.
    """
    leaves = leaves_of(state)
    shards = {}
    for path in {piece.path for piece in pieces}:
        for shard in leaves[path].addressable_shards:
            key = path, index_of(shard.index, leaves[path].shape)
            if key not in shards:
                shard.data.copy_to_host_async()
                shards[key] = shard.data
    buffer = np.zeros(size, np.uint32)
    for piece in pieces:
        data = np.ascontiguousarray(shards[piece.path, piece.index]).reshape(-1).view(np.uint8)
        buffer[piece.start : piece.stop].view(np.uint8)[: data.size] = data
    return buffer


def place_words(
    parts: Iterable[tuple[Sequence[Piece], UInt32[np.ndarray, " size"]]], target: Any
) -> Any:
    """Return the state whose bits were packed.

    Args:
        parts: Pieces and words of the local processes.
        target: State with the same arrays and shardings.
    """
    by_path = {}
    for pieces, buffer in parts:
        for piece in pieces:
            by_path[piece.path, piece.index] = piece.values(buffer)
    arrays = {}
    for path, leaf in leaves_of(target).items():

        def part(index: Any, path: str = path, shape: tuple[int, ...] = leaf.shape) -> np.ndarray:
            return by_path[path, index_of(index, shape)]

        arrays[path] = jax.make_array_from_callback(leaf.shape, leaf.sharding, part)
    return unpack(traverse_util.unflatten_dict(arrays, sep=SEPARATOR), target)


def leaves_of(state: Any) -> dict[str, Any]:
    """Return the arrays of a state by path; random keys as their words."""
    return cast(dict[str, jax.Array], traverse_util.flatten_dict(pack(state), sep=SEPARATOR))


def index_of(index: Sequence[slice], shape: Sequence[int]) -> Index:
    """Return the bounds of a part of an array of this shape."""
    parts = (part.indices(size) for part, size in zip(index, shape, strict=True))
    return tuple((first, last) for first, last, _ in parts)
