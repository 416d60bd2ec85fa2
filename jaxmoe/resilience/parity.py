# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Parity over processes: what any one of them has lost, the others bring back, bit for bit.

Each of N processes has as many words of 32 bits, cut into N - 1 blocks with a block of zeros put in
at its own place; process j keeps the sum of everybody's block j, modulo 2^32:

    P_j = sum over i of block(i, j),    block(i, i) = 0            (one `psum_scatter`)

None of the words of process k are in P_k, so that with k its words are lost and nothing that is
needed to bring them back. In one sum over the others (`psum`)

    row j:  P_j - sum over i of block(i, j) = block(k, j)
    row k:      - sum over i of block(i, k) = -P_k

are the lost words and, negated, the lost parity. It costs 1 / (N - 1) of the memory and sends each
word once; two processes mirror one another. Two losses are one too many (that takes a Reed-Solomon
code). Words travel by way of one device of each process, a piece at a time.

`encode_reference` and `rebuild_reference` say the same in numpy. Source: RAID 5, and the in-memory
checkpoints with erasure codes of REFT (arXiv 2310.12670).
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
"""Words of all blocks that are on the device at once, by default: 64 MiB."""
_AXIS = "process"


class TooManyLostError(JaxmoeError, ValueError):
    """More than one process has lost its words."""


def padded(num_words: int, processes: int) -> int:
    """The least multiple of N - 1 blocks that holds so many words."""
    blocks = max(processes - 1, 1)
    return -(-num_words // blocks) * blocks


def only_lost(has: Sequence[bool]) -> int | None:
    """The process that has nothing; None: all of them have.

    Args:
        has: for each process whether it has its words and its parity.

    Raises:
        TooManyLostError: more than one has nothing.
    """
    lost = [process for process, is_there in enumerate(has) if not is_there]
    # Whoever is alone has no other to ask.
    if len(lost) > (len(has) > 1):
        names = ", ".join(map(str, lost))
        raise TooManyLostError(
            f"{len(lost)} of {len(has)} processes ({names}) have lost their words: parity brings"
            f" back {'one' if len(has) > 1 else 'none where there is no other process'}"
        )
    return lost[0] if lost else None


def cut(words: Words, own: int, processes: int) -> UInt32[np.ndarray, "processes block"]:
    """The blocks of one process, with zeros at its own place.

    Args:
        words: as many as `padded` says.
        own: number of the process.
        processes: all of them.
    """
    return np.insert(words.reshape(processes - 1, -1), own, np.uint32(0), axis=0)


def encode_reference(words: Mapping[int, Words], processes: int) -> dict[int, Block]:
    """The parity of each process, from the words of all of them.

    Args:
        words: by process, all of one length that `padded` gave.
        processes: all of them.
    """
    if processes == 1:
        return {0: np.zeros(0, np.uint32)}
    total = sum(cut(words[own], own, processes) for own in range(processes))
    return dict(enumerate(np.asarray(total)))


def rebuild_reference(
    words: Mapping[int, Words], parity: Mapping[int, Block], processes: int
) -> tuple[int, Words, Block]:
    """The process that is missing, its words and its parity.

    Args:
        words: of the others.
        parity: of the others.
        processes: all of them.

    Raises:
        TooManyLostError: more than one is missing.
    """
    lost = only_lost([process in words for process in range(processes)])
    if lost is None:
        raise ValueError("nothing is lost")
    others = [process for process in range(processes) if process != lost]
    blocks = [parity[j] - sum(cut(words[i], i, processes)[j] for i in others) for j in others]
    own = sum(cut(words[i], i, processes)[lost] for i in others)
    return lost, np.concatenate(blocks).astype(np.uint32), np.asarray(own, np.uint32)


class Peers:
    """The processes, each by one of its devices; all of them must make each call.

    Args:
        devices: one for each process, in their order.
        piece: words of all blocks that are on a device at once.
    """

    def __init__(self, devices: Sequence[jax.Device], *, piece: int = PIECE):
        self._devices, self._piece = list(devices), piece
        self._mesh = Mesh(np.asarray(self._devices, dtype=object), (_AXIS,))

    @property
    def count(self) -> int:
        """Processes."""
        return len(self._devices)

    def encode(self, words: Mapping[int, Words]) -> dict[int, Block]:
        """The parity of each process that is here.

        Args:
            words: of the processes that are here, of one length on all.
        """
        if self.count == 1:
            return encode_reference(words, 1)
        block = len(next(iter(words.values()))) // (self.count - 1)
        parity = {own: np.empty(block, np.uint32) for own in words}

        def given(own: int, part: slice) -> UInt32[np.ndarray, "processes piece"]:
            blocks = words[own].reshape(self.count - 1, block)[:, part]
            return np.insert(blocks, own, np.uint32(0), axis=0)

        for part, sums in self._run(_scattered, block, words, given):
            for own, values in sums.items():
                parity[own][part] = values[0]
        return parity

    def rebuild(
        self, lost: int, words: Mapping[int, Words], parity: Mapping[int, Block]
    ) -> tuple[Words, Block]:
        """The lost process's words and parity, on every process.

        Args:
            lost: its number.
            words: of the processes that are here; of the lost one anything of that length.
            parity: likewise.
        """
        block = len(next(iter(words.values()))) // (self.count - 1)
        found = np.empty((self.count, block), np.uint32)

        def given(own: int, part: slice) -> UInt32[np.ndarray, "processes piece"]:
            blocks = words[own].reshape(self.count - 1, block)[:, part]
            if own == lost:
                return np.zeros((self.count, blocks.shape[1]), np.uint32)
            return np.insert(np.negative(blocks), own, parity[own][part], axis=0)

        for part, sums in self._run(_summed, block, words, given):
            found[:, part] = next(iter(sums.values()))
        return np.delete(found, lost, axis=0).reshape(-1), np.negative(found[lost])

    def _run(
        self,
        make: Callable[[Mesh], Callable[[Array], Array]],
        block: int,
        here: Mapping[int, Any],
        given: Callable[[int, slice], UInt32[np.ndarray, "processes piece"]],
    ) -> Iterator[tuple[slice, dict[int, np.ndarray]]]:
        """The pieces of a block one after the other, all of one size; and what came of each."""
        size = max(min(self._piece // self.count, block), 1)
        placed = NamedSharding(self._mesh, PartitionSpec(_AXIS))
        for start in range(0, block, size):
            part = slice(start, min(start + size, block))
            width = part.stop - part.start
            arrays = []
            for own in sorted(here):
                piece = np.pad(given(own, part), ((0, 0), (0, size - width)))
                arrays.append(jax.device_put(piece[None], self._devices[own]))
            shape = (self.count, self.count, size)
            whole = jax.make_array_from_single_device_arrays(shape, placed, arrays)
            # A program of its own mesh, whichever is current.
            with jax.set_mesh(self._mesh):
                summed = make(self._mesh)(whole)
            by_device = {shard.device: shard.data for shard in summed.addressable_shards}
            yield (
                part,
                {own: np.asarray(by_device[self._devices[own]])[:, :width] for own in here},
            )


@functools.lru_cache(maxsize=2)
def _scattered(mesh: Mesh) -> Callable[[Array], Array]:
    """Row j of the sum on process j."""

    def local(blocks: UInt32[Array, "1 processes piece"]) -> UInt32[Array, "1 piece"]:
        return jax.lax.psum_scatter(blocks[0], _AXIS, scatter_dimension=0, tiled=True)

    each = PartitionSpec(_AXIS)
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=each, out_specs=each))


@functools.lru_cache(maxsize=2)
def _summed(mesh: Mesh) -> Callable[[Array], Array]:
    """The whole sum on every process."""

    def local(blocks: UInt32[Array, "1 processes piece"]) -> UInt32[Array, "processes piece"]:
        return jax.lax.psum(blocks[0], _AXIS)

    each = PartitionSpec(_AXIS)
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=each, out_specs=PartitionSpec()))
