# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Computes parity over processes, from which the words of one lost process are rebuilt.

Each of N processes has equally many 32-bit words, cut into N - 1 blocks, with a block of zeros
inserted at its own position; process j keeps the sum over all processes of block j, modulo 2^32:

    P_j = sum over i of block(i, j),    block(i, i) = 0            (one `psum_scatter`)

P_k contains no words of process k, so losing process k loses nothing that is needed to rebuild it.
In one sum over the other processes (`psum`)

    row j:  P_j - sum over i of block(i, j) = block(k, j)
    row k:      - sum over i of block(i, k) = -P_k

are the lost words and, negated, the lost parity. It costs 1 / (N - 1) of the memory and sends each
word once; two processes mirror each other. Two lost processes cannot be rebuilt (that takes a
Reed-Solomon code). Words pass through one device of each process, a piece at a time.

`encode_reference` and `rebuild_reference` are the numpy references. Source: RAID 5, and the
in-memory checkpoints with erasure codes of REFT (arXiv 2310.12670).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, UInt32

from jaxmoe.errors import JaxmoeError

Words = UInt32[np.ndarray, " words"]
Block = UInt32[np.ndarray, " block"]

PIECE = 1 << 24
"""Words of all blocks that are on the device at once by default: 64 MiB."""
_AXIS = "process"


class TooManyLostError(JaxmoeError, ValueError):
    """More than one process has lost its words."""


def pad_words(num_words: int, processes: int) -> int:
    """Return the least multiple of N - 1 blocks that holds a number of words."""
    blocks = max(processes - 1, 1)
    return -(-num_words // blocks) * blocks


def only_lost(has: Sequence[bool]) -> int | None:
    """Return the process that has nothing; None if all have their words.

    Args:
        has: Whether each process has its words and its parity.

    Raises:
        TooManyLostError: More than one has nothing.
    """
    lost = [process for process, is_there in enumerate(has) if not is_there]
    # A single process has no peer to rebuild from.
    if len(lost) > (len(has) > 1):
        names = ", ".join(map(str, lost))
        raise TooManyLostError(
            f"{len(lost)} of {len(has)} processes ({names}) have lost their snapshots: parity"
            f" restores {'one' if len(has) > 1 else 'none without another process'}"
        )
    return lost[0] if lost else None


def cut(buffer: Words, process: int, processes: int) -> UInt32[np.ndarray, "processes block"]:
    """Return the blocks of one process, with zeros at its own place.

    Args:
        buffer: As many words as `pad_words` returns.
        process: Number of the process.
        processes: Number of processes.
    """
    return np.insert(buffer.reshape(processes - 1, -1), process, np.uint32(0), axis=0)


def encode_reference(buffers: Mapping[int, Words], processes: int) -> dict[int, Block]:
    """Return the parity of each process from the words of all.

    Args:
        buffers: Words by process, all of a length from `pad_words`.
        processes: Number of processes.
    """
    if processes == 1:
        return {0: np.zeros(0, np.uint32)}
    total = sum(cut(buffers[process], process, processes) for process in range(processes))
    return dict(enumerate(np.asarray(total)))


class Peers:
    """Computes parity on one device of each process; all processes make each call.

    Args:
        devices: One device of each process, in order.
        piece: Words of all blocks that are on a device at once.
    """

    def __init__(self, devices: Sequence[jax.Device], *, piece: int = PIECE):
        self._devices = list(devices)
        self._piece = piece
        self._mesh = Mesh(np.asarray(self._devices, dtype=object), (_AXIS,))

    @property
    def count(self) -> int:
        """Number of processes."""
        return len(self._devices)

    def encode(self, buffers: Mapping[int, Words]) -> dict[int, Block]:
        """Return the parity of each local process.

        Args:
            buffers: Words of the local processes, of one length on all.
        """
        if self.count == 1:
            return encode_reference(buffers, 1)
        block = len(next(iter(buffers.values()))) // (self.count - 1)
        parity = {process: np.empty(block, np.uint32) for process in buffers}

        def given(process: int, part: slice) -> UInt32[np.ndarray, "processes piece"]:
            blocks = buffers[process].reshape(self.count - 1, block)[:, part]
            return np.insert(blocks, process, np.uint32(0), axis=0)

        for part, sums in self._run(_scatter, block, buffers, given):
            for process, values in sums.items():
                parity[process][part] = values[0]
        return parity

    def rebuild(
        self,
        lost: int,
        buffers: Mapping[int, Words],
        parity: Mapping[int, Block],
        saved: Sequence[int | None] | None = None,
        processes: int | None = None,
    ) -> tuple[Words, Block]:
        """Return the words and the parity of the lost process, on every process.

        Args:
            lost: Number of the lost process among those that saved.
            buffers: Words of the local processes; those of one that holds none are ignored.
            parity: Parity of the local processes, likewise.
            saved: Number that each process had when it saved, None for one that holds nothing; its
                own number when None.
            processes: Number of processes that saved; as many as there are when None.
        """
        processes = self.count if processes is None else processes
        saved = list(range(self.count)) if saved is None else saved
        block = len(next(iter(buffers.values()))) // (processes - 1)
        rebuilt = np.empty((processes, block), np.uint32)

        def given(process: int, part: slice) -> UInt32[np.ndarray, "processes piece"]:
            number = saved[process]
            blocks = buffers[process].reshape(processes - 1, block)[:, part]
            if number is None or number == lost:
                return np.zeros((processes, blocks.shape[1]), np.uint32)
            return np.insert(np.negative(blocks), number, parity[process][part], axis=0)

        for part, sums in self._run(_sum_up, block, buffers, given, rows=processes):
            rebuilt[:, part] = next(iter(sums.values()))
        return np.delete(rebuilt, lost, axis=0).reshape(-1), np.negative(rebuilt[lost])

    def share_words(self, holder: int, buffers: Mapping[int, Words]) -> Words:
        """Return the words of one process, on every process.

        Args:
            holder: Number of that process.
            buffers: Words of the local processes, of one length on all; further ones are ignored.
        """
        shared = np.empty(len(next(iter(buffers.values()))), np.uint32)

        def given(process: int, part: slice) -> UInt32[np.ndarray, "1 piece"]:
            piece = buffers[process][None, part]
            return piece if process == holder else np.zeros_like(piece)

        for part, sums in self._run(_sum_up, len(shared), buffers, given, rows=1):
            shared[part] = next(iter(sums.values()))[0]
        return shared

    def _run(
        self,
        make: Callable[[Mesh], Callable[[Array], Array]],
        block: int,
        local: Mapping[int, Any],
        rows_of: Callable[[int, slice], UInt32[np.ndarray, "rows piece"]],
        rows: int | None = None,
    ) -> Iterator[tuple[slice, dict[int, np.ndarray]]]:
        """Yield the pieces of a block, all of one size, and the result of each."""
        rows = self.count if rows is None else rows
        size = max(min(self._piece // rows, block), 1)
        placed = NamedSharding(self._mesh, PartitionSpec(_AXIS))
        for start in range(0, block, size):
            part = slice(start, min(start + size, block))
            width = part.stop - part.start
            arrays = []
            for process in sorted(local):
                piece = np.pad(rows_of(process, part), ((0, 0), (0, size - width)))
                arrays.append(jax.device_put(piece[None], self._devices[process]))
            shape = (self.count, rows, size)
            global_array = jax.make_array_from_single_device_arrays(shape, placed, arrays)
            # The program uses its own mesh, not the current one.
            with jax.set_mesh(self._mesh):
                summed = make(self._mesh)(global_array)
            by_device = {shard.device: shard.data for shard in summed.addressable_shards}
            yield (
                part,
                {
                    process: np.asarray(by_device[self._devices[process]])[:, :width]
                    for process in local
                },
            )


@functools.lru_cache(maxsize=2)
def _scatter(mesh: Mesh) -> Callable[[Array], Array]:
    """Return a program that leaves row j of the sum on process j."""

    def local(blocks: UInt32[Array, "1 processes piece"]) -> UInt32[Array, "1 piece"]:
        return jax.lax.psum_scatter(blocks[0], _AXIS, scatter_dimension=0, tiled=True)

    each = PartitionSpec(_AXIS)
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=each, out_specs=each))


@functools.lru_cache(maxsize=2)
def _sum_up(mesh: Mesh) -> Callable[[Array], Array]:
    """Return a program that leaves the whole sum on every process."""

    def local(blocks: UInt32[Array, "1 processes piece"]) -> UInt32[Array, "processes piece"]:
        return jax.lax.psum(blocks[0], _AXIS)

    each = PartitionSpec(_AXIS)
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=each, out_specs=PartitionSpec()))
