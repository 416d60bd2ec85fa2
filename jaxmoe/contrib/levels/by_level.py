# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Levels: the devices that share a document differ between micro-batches, in one program.

A row has N C tokens, C on each of the N = mesh.seq devices. At level l it is N/d parts of d = 2^l
devices, and no document crosses a multiple of d C tokens (`jaxmoe.contrib.levels` packs them so):

    d = 1    attention on each device, nothing travels
    d > 1    a ring over the fastest l pieces of mesh.seq; 2 (d - 1) permutes of C keys and values

The level is an array alike on all devices, so that its branches may hold collectives. Short
documents pay for no ring. Linear layers, experts and losses see C tokens on each device at every
level. Without a level all N devices share the row.

Sources: ByteScale (arXiv 2502.21231), FlexSP (arXiv 2412.01523), Zeppelin (arXiv 2509.21841). They
mix degrees within a micro-batch; here a micro-batch has one.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import ClassVar, Final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from pallas_kernels.sequence_layout import SequenceLayout
from sharding.fold import MoEMesh
from sharding.sequence_parallel.all_gather import observe_gathered
from sharding.sequence_parallel.form import (
    Cut,
    HeldAttention,
    RingMessage,
    SequenceForm,
    SequenceParallelism,
)
from sharding.sequence_parallel.local_attention import LocalAttention, Seen, attend_locally
from sharding.sequence_parallel.ring import RingConfig
from sharding.sequence_parallel.sizes import AttentionSizes

LEVEL: Final = "level"
"""Name of the log2 of the devices that share a document, of a micro-batch."""

_RING = RingConfig()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LevelsConfig(SequenceForm):
    """Rings of as many devices as the documents of a micro-batch need; with data.packing levels."""

    name: ClassVar[str] = "levels"
    layout: ClassVar[SequenceLayout] = "zigzag"
    reads: ClassVar[tuple[str, ...]] = (LEVEL,)

    def mesh_fold(self, fold: MoEMesh | None, seq: int) -> MoEMesh | None:
        """Return a fold that cuts mesh.seq into pieces of 2."""
        cuts = tuple(2**i for i in range(1, max(seq, 1).bit_length() - 1))
        return dataclasses.replace(fold or MoEMesh(), seq_cuts=cuts) if cuts else fold

    def token_order(
        self,
        length: int,
        ranks: int,
        segment_ids: Int[Array, "B S"] | None = None,
        arrays: Mapping[str, Array] = MappingProxyType({}),
    ) -> Int[np.ndarray, " S"] | Int[Array, " S"] | None:
        """Return the token at each position: a zigzag over the devices of each part.

        Args:
            length: Tokens of a row.
            ranks: Devices that share a row.
            segment_ids: Not read.
            arrays: `level`, log2 of the devices of a part; all of them without it.
        """
        del segment_ids
        if ranks == 1 or LEVEL not in arrays:
            return _RING.token_order(length, ranks)
        orders = [_order_within(length, ranks, degree) for degree in _powers(ranks)]
        return jnp.asarray(np.stack(orders))[arrays[LEVEL]]

    def attend(self, inputs: HeldAttention) -> tuple[Array, Seen]:
        """Return attention of the queries held here to the keys of the devices of their part."""
        ranks = inputs.cut.length // inputs.cut.held
        if LEVEL not in inputs.arrays:
            return _attend_at(ranks, inputs)
        arrays = inputs._replace(arrays={}, rules=None, cut=None)  # rules and cut are static

        def branch(degree: int, arrays: HeldAttention) -> tuple[Array, Seen]:
            return _attend_at(degree, arrays._replace(rules=inputs.rules, cut=inputs.cut))

        branches = [functools.partial(branch, degree) for degree in _powers(ranks)]
        return jax.lax.switch(inputs.arrays[LEVEL], branches, arrays)

    def _messages(self, sizes: AttentionSizes, is_backward: bool) -> Iterator[RingMessage]:
        """Yield the messages of the highest level."""
        return _RING.messages(sizes, is_backward=is_backward)


def document_degrees(form: SequenceParallelism, ranks: int) -> tuple[int, ...]:
    """Return how many devices may share the documents of a micro-batch, in ascending order.

    Args:
        form: Form of the sequence parallelism: every power of two by level; all devices otherwise.
        ranks: Devices that share a row.
    """
    return _powers(ranks) if isinstance(form, LevelsConfig) else (ranks,)


def _powers(ranks: int) -> tuple[int, ...]:
    """Return every power of two up to the ranks."""
    return tuple(2**level for level in range(ranks.bit_length()))


def _attend_at(degree: int, inputs: HeldAttention) -> tuple[Array, Seen]:
    """Return attention within parts of `degree` devices."""
    if degree == 1:
        q, k, v, tokens, rules = inputs[:5]
        return attend_locally(LocalAttention(q, k, v, tokens, tokens, rules))
    axes = ()
    size = 1
    while size < degree:
        axes = (inputs.cut.axes[-1 - len(axes)], *axes)
        size *= jax.lax.axis_size(axes[0])
    inputs = inputs._replace(cut=Cut(axes, degree * inputs.cut.held, inputs.cut.held))
    out, sums = _RING.attend_along(inputs, axis=axes)
    return out, observe_gathered(inputs, _RING) | sums


def _order_within(length: int, ranks: int, degree: int) -> Int[np.ndarray, " S"]:
    """Return the token at each position of a row whose parts of `degree` devices are zigzags."""
    part = length // ranks * degree
    inner = _RING.token_order(part, degree)
    inner = np.arange(part) if inner is None else np.asarray(inner)
    starts = np.arange(0, length, part)
    return (starts[:, None] + inner).reshape(-1).astype(np.int32)
