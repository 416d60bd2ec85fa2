# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Keys and values gathered: every device attends with its own queries to the whole sequence.

    k, v    [B S/N M H]  -> all-gather       [B S M H]      received (N - 1) S/N M H values each
    dk, dv  [B S M H]    -> reduce-scatter   [B S/N M H]    sent as many, backward

Two messages a layer, none of which can hide behind a block of the softmax; S M H keys and values
exist on every device. It suits few key heads and moderate lengths. Llama 3 trains long contexts
with it (arXiv 2407.21783, section 3.3.2).

In zigzag order the devices have equal work where the kernel skips what the mask hides.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import ClassVar, Literal

import jax
from jaxtyping import Array

from sharding.sequence_parallel.form import HeldAttention, RingMessage, SequenceForm
from sharding.sequence_parallel.local_attention import (
    HeldTokens,
    LocalAttention,
    Seen,
    attend_locally,
)
from sharding.sequence_parallel.sizes import AttentionSizes


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AllGatherKVConfig(SequenceForm):
    """Every device gathers all keys and values."""

    name: ClassVar[str] = "all_gather"

    layout: Literal["zigzag", "contiguous"] = "zigzag"
    """Which tokens a device holds: the first and last of 2N pieces alike, or the r-th of N."""

    def attend(self, inputs: HeldAttention) -> tuple[Array, Seen]:
        """Return attention of the queries held here over gathered keys."""
        return attend_gathered(inputs, self)

    def _messages(self, sizes: AttentionSizes, is_backward: bool) -> Iterator[RingMessage]:
        del is_backward
        n = sizes.ranks
        # Half of it each way round, from neighbour to neighbour.
        shard = 2 * sizes.local_tokens * sizes.local_kv_heads * sizes.head_dim * sizes.itemsize
        for step in (1, -1):
            pairs = tuple((rank, (rank + step) % n) for rank in range(n))
            yield RingMessage((n - 1) * shard / 2, pairs)

    def num_messages(self, sizes: AttentionSizes, *, is_backward: bool) -> int:
        """Return one message for keys and one for values to every other rank."""
        del is_backward
        return 2 * (sizes.ranks - 1)


def attend_gathered(inputs: HeldAttention, form: SequenceForm) -> tuple[Array, Seen]:
    """Return attention of the queries held here over gathered keys.

    Args:
        inputs: Arrays of this device.
        form: The form that laid its tokens out.
    """
    q, k, v, tokens, rules, cut = inputs[:6]

    def gather(x: Array) -> Array:
        return jax.lax.all_gather(x, cut.axes, axis=x.ndim - 1 if x.ndim < 3 else 1, tiled=True)

    tokens = cut.with_positions(tokens, form)
    keys = HeldTokens(*(None if x is None else gather(x) for x in tokens))
    return attend_locally(LocalAttention(q, gather(k), gather(v), tokens, keys, rules))


def observe_gathered(inputs: HeldAttention, form: SequenceForm) -> Seen:
    """Return the watched logits of a form that does not compute them: a pass over gathered keys.

    Args:
        inputs: Arrays of this device; nothing is computed unless its rules observe logits.
        form: The form that laid its tokens out.
    """
    if not inputs.rules.is_observed:
        return {}
    q, k = jax.lax.stop_gradient((inputs.q, inputs.k))
    return attend_gathered(inputs._replace(q=q, k=k, v=k), form)[1]
