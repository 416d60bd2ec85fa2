# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Keys and values gathered: every device attends with its own queries to the whole sequence.

    k, v    [B S/N M H]  -> all-gather       [B S M H]      received (N - 1) S/N M H values each
    dk, dv  [B S M H]    -> reduce-scatter   [B S/N M H]    sent as many, backward

Two messages a layer, none of which can hide behind a block of the softmax; S M H keys and values
exist on every device. It suits few key heads, and lengths that fit. Llama 3 trains long contexts
so (arXiv 2407.21783, section 3.3.2).

In zigzag order the devices have equal work where the kernel skips what the mask hides.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

import jax
from jaxtyping import Array, Float

from sharding.sequence_parallel.local_attention import (
    AttentionRules,
    HeldTokens,
    Seen,
    attend_locally,
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AllGatherKVConfig:
    """Every device gathers all keys and values."""

    name: ClassVar[str] = "all_gather"

    layout: Literal["zigzag", "contiguous"] = "zigzag"
    """Which tokens a device holds: the first and last of 2N pieces alike, or the r-th of N."""


def attend_gathered(
    q: Float[Array, "B s N H"],
    k: Float[Array, "B s M H"],
    v: Float[Array, "B s M H"],
    tokens: HeldTokens,
    rules: AttentionRules,
    *,
    axes: tuple[str, ...],
) -> tuple[Float[Array, "B s N H"], Seen]:
    """Attention of the queries held here over gathered keys.

    Args:
        q: queries of this device.
        k: keys of this device.
        v: values of this device.
        tokens: where they stand; positions are given.
        rules: of the mask.
        axes: mesh axes over which sequences are cut.
    """

    def gather(x: Array) -> Array:
        return jax.lax.all_gather(x, axes, axis=x.ndim - 1 if x.ndim < 3 else 1, tiled=True)

    keys = HeldTokens(*(None if x is None else gather(x) for x in tokens))
    return attend_locally(q, gather(k), gather(v), tokens, keys, rules)


def observe_gathered(
    q: Float[Array, "B s N H"],
    k: Float[Array, "B s M H"],
    tokens: HeldTokens,
    rules: AttentionRules,
    *,
    axes: tuple[str, ...],
) -> Seen:
    """What is watched of a form that does not show it: a pass over gathered keys, for no output.

    Args:
        q: queries of this device.
        k: keys of this device.
        tokens: where they stand; positions are given.
        rules: of the mask; nothing is done unless it says that somebody watches.
        axes: mesh axes over which sequences are cut.
    """
    if not rules.is_observed:
        return {}
    q, k = jax.lax.stop_gradient((q, k))
    return attend_gathered(q, k, k, tokens, rules, axes=axes)[1]
