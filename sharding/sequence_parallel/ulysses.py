# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Ulysses: positions are exchanged for heads, and each device attends to whole sequences.

    q, k, v   [B S/N n H]  -> all-to-all   [B S n/N H]      n: the heads of each
    out       [B S N/N H]  -> all-to-all   [B S/N N H]

Four messages a layer and direction of the gradient, (N - 1) / N of S/N H (2 n_q + 2 n_kv) values:
each device sends less as N grows (DeepSpeed-Ulysses, arXiv 2309.14509). Heads limit it: N must
divide the query heads and the key heads of a device.

Nothing is permuted: a device that has whole sequences has equal work with every mask.

With chunks, the heads are exchanged in that many groups, whose messages the compiler may overlap
with the arithmetic of the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.sequence_layout import SequenceLayout
from sharding.sequence_parallel.form import HeldAttention, RingMessage, SequenceForm, gather_tokens
from sharding.sequence_parallel.local_attention import (
    LocalAttention,
    Seen,
    attend_locally,
)
from sharding.sequence_parallel.sizes import AttentionSizes


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class UlyssesConfig(SequenceForm):
    """Positions exchanged for heads; mesh.seq must divide the key heads of a device."""

    name: ClassVar[str] = "ulysses"
    layout: ClassVar[SequenceLayout] = "contiguous"

    num_chunks: int = 1
    """Groups of heads that are exchanged one after the other, to hide messages; 1: all at once."""

    def __post_init__(self):
        if self.num_chunks < 1:
            raise ValueError(
                f"sequence_parallel.num_chunks={self.num_chunks} must be at least 1, all heads at"
                " once"
            )

    def check_heads(self, sizes: AttentionSizes) -> None:
        """Check that the ranks divide the heads of a device.

        Raises:
            ValueError: They do not, or the chunks do not divide what is left.
        """
        possible = sizes.exchangeable
        if sizes.ranks not in possible:
            separator = " or " if len(possible) < 3 else ", "
            raise ValueError(
                f"execution.sequence_parallel 'ulysses' exchanges heads, and the"
                f" {sizes.local_heads} query and {sizes.local_kv_heads} key heads of a device"
                f" (attention.num_heads={sizes.num_heads}, attention.num_kv_heads="
                f"{sizes.num_kv_heads}, mesh.tensor={sizes.tensor}) must be divisible by"
                f" mesh.seq={sizes.ranks}: set mesh.seq to"
                f" {separator.join(map(str, possible))}, or execution.sequence_parallel to ring or"
                " all_gather"
            )
        heads = sizes.local_kv_heads // sizes.ranks
        if heads % self.num_chunks:
            raise ValueError(
                f"the {heads} key heads that a device has after the exchange"
                f" (attention.num_kv_heads={sizes.num_kv_heads}, mesh.tensor={sizes.tensor},"
                f" mesh.seq={sizes.ranks}) must be divisible by"
                f" execution.sequence_parallel.num_chunks={self.num_chunks}"
            )

    def attend(self, inputs: HeldAttention) -> tuple[Array, Seen]:
        """Return attention of some heads over whole sequences, exchanged back."""
        q, k, v, tokens, rules, cut = inputs[:6]
        axes = cut.axes
        all_tokens = gather_tokens(tokens, cut.axes)

        def chunk(number: int) -> tuple[Array, Seen]:
            def part(x: Array) -> Array:
                size = x.shape[2] // self.num_chunks
                return to_heads(x[:, :, number * size : (number + 1) * size], axes)

            heads = part(q), part(k), part(v)
            out, seen = attend_locally(LocalAttention(*heads, all_tokens, all_tokens, rules))
            return to_positions(out, axes), {n: to_heads(x, axes) for n, x in seen.items()}

        parts = [chunk(number) for number in range(self.num_chunks)]
        if self.num_chunks == 1:
            return parts[0]
        out = jnp.concatenate([out for out, _ in parts], axis=2)
        return out, {
            name: jnp.concatenate([seen[name] for _, seen in parts], axis=1) for name in parts[0][1]
        }

    def _messages(self, sizes: AttentionSizes, is_backward: bool) -> Iterator[RingMessage]:
        del is_backward
        heads = 2 * sizes.local_heads + 2 * sizes.local_kv_heads
        local = sizes.local_tokens * sizes.head_dim * sizes.itemsize * heads
        ranks = range(sizes.ranks)
        yield RingMessage(
            local / sizes.ranks, tuple((i, j) for i in ranks for j in ranks if i != j)
        )

    def num_messages(self, sizes: AttentionSizes, *, is_backward: bool) -> int:
        """Return four messages to every other rank for each chunk."""
        del is_backward
        return 4 * (sizes.ranks - 1) * self.num_chunks


def to_heads(x: Array, axes: str | tuple[str, ...]) -> Array:
    """Exchange parts of dimension 2 (heads) for parts of dimension 1 (positions).

    Args:
        x: Array [B s n ...] of this device.
        axes: Mesh axes over which positions are sharded.
    """
    return jax.lax.all_to_all(x, axes, split_axis=2, concat_axis=1, tiled=True)


def to_positions(x: Array, axes: str | tuple[str, ...]) -> Array:
    """Undo `to_heads`."""
    return jax.lax.all_to_all(x, axes, split_axis=1, concat_axis=2, tiled=True)
