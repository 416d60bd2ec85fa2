# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Ulysses: positions are exchanged for heads, and each device attends to whole sequences.

    q, k, v   [B S/N n H]  -> all-to-all   [B S n/N H]      n: the heads of each
    out       [B S N/N H]  -> all-to-all   [B S/N N H]

Four messages a layer and direction of the gradient, (N - 1) / N of S/N H (2 n_q + 2 n_kv) values:
what each device sends falls as N grows (DeepSpeed-Ulysses, arXiv 2309.14509). Heads limit it: N
must divide the query heads and the key heads of a device.

Nothing is permuted: a device that has whole sequences has equal work with every mask.

With chunks, the heads go in so many groups, whose messages the compiler may move beside the
arithmetic of the others.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.sequence_layout import SequenceLayout
from sharding.sequence_parallel.local_attention import (
    AttentionRules,
    HeldTokens,
    Seen,
    attend_locally,
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class UlyssesConfig:
    """Positions exchanged for heads; mesh.seq must divide the key heads of a device."""

    name: ClassVar[str] = "ulysses"
    layout: ClassVar[SequenceLayout] = "contiguous"
    """Which tokens a device holds."""

    num_chunks: int = 1
    """Groups of heads that are exchanged one after the other, to hide messages; 1: all at once."""

    def __post_init__(self):
        if self.num_chunks < 1:
            raise ValueError(
                f"sequence_parallel.num_chunks={self.num_chunks} must be at least 1, all heads at"
                " once"
            )


def attend_exchanged(
    q: Float[Array, "B s N H"],
    k: Float[Array, "B s M H"],
    v: Float[Array, "B s M H"],
    tokens: HeldTokens,
    rules: AttentionRules,
    *,
    axes: tuple[str, ...],
    num_chunks: int = 1,
) -> tuple[Float[Array, "B s N H"], Seen]:
    """Attention of some heads over whole sequences.

    Args:
        q: queries of this device.
        k: keys of this device.
        v: values of this device.
        tokens: where they stand; positions None: in order over the devices.
        rules: of the mask.
        axes: mesh axes over which sequences are cut.
        num_chunks: groups of heads.
    """
    whole = HeldTokens(
        *(
            None if x is None else jax.lax.all_gather(x, axes, axis=x.ndim - 1, tiled=True)
            for x in tokens
        )
    )

    def to_heads(x: Array) -> Array:
        return jax.lax.all_to_all(x, axes, split_axis=2, concat_axis=1, tiled=True)

    def chunk(number: int) -> tuple[Array, Seen]:
        def part(x: Array) -> Array:
            size = x.shape[2] // num_chunks
            return to_heads(x[:, :, number * size : (number + 1) * size])

        out, seen = attend_locally(part(q), part(k), part(v), whole, whole, rules)
        out = jax.lax.all_to_all(out, axes, split_axis=1, concat_axis=2, tiled=True)
        back = {
            name: jax.lax.all_to_all(x, axes, split_axis=2, concat_axis=1, tiled=True)
            for name, x in seen.items()
        }
        return out, back

    parts = [chunk(number) for number in range(num_chunks)]
    if num_chunks == 1:
        return parts[0]
    out = jnp.concatenate([out for out, _ in parts], axis=2)
    return out, {
        name: jnp.concatenate([seen[name] for _, seen in parts], axis=1) for name in parts[0][1]
    }
