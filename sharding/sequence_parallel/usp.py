# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Ulysses inside, a ring outside: more devices than heads can be exchanged among.

mesh.seq = R x U, U the faster. With c tokens, n query and m key heads on each device:

    all-to-all over U    [B c n H] -> [B U c n/U H]      (U - 1)/U c H b (2 n + 2 m) bytes
    ring over R          of U c tokens and m/U key heads   (R - 1) c 2 m H b
    all-to-all back

The layout is that of the ring, with R ranks; the devices of U hold equal parts of what a rank has.
Source: USP, arXiv 2405.07719. The axis is cut by the mesh: `fold.seq_inner` is U.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
from jaxtyping import Array, Float

from pallas_kernels.ring_attention.api import Directions, Transport
from pallas_kernels.sequence_layout import SequenceLayout
from sharding.sequence_parallel.local_attention import AttentionRules, HeldTokens
from sharding.sequence_parallel.ring import RingConfig, attend_ring


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class UlyssesRingConfig:
    """Heads exchanged among few devices, keys sent round between such groups."""

    name: ClassVar[str] = "usp"

    ulysses: int = 2
    """Devices among which heads are exchanged; fold.seq_inner must be the same."""
    layout: SequenceLayout = "zigzag"
    """Which tokens a rank of the ring holds; see `ring`."""
    directions: Directions = "one"
    """Which way round; see `ring`."""
    transport: Transport = "ppermute"
    """How keys travel; see `ring`."""

    def __post_init__(self):
        if self.ulysses < 2:
            raise ValueError(
                f"sequence_parallel.ulysses={self.ulysses} must be at least 2: with 1 it is ring"
            )

    @property
    def ring(self) -> RingConfig:
        """The ring between groups."""
        return RingConfig(layout=self.layout, directions=self.directions, transport=self.transport)


def attend_usp(
    q: Float[Array, "B s N H"],
    k: Float[Array, "B s M H"],
    v: Float[Array, "B s M H"],
    tokens: HeldTokens,
    rules: AttentionRules,
    *,
    inner: str,
    outer: str,
    config: UlyssesRingConfig,
) -> Float[Array, "B s N H"]:
    """Attention of some heads over what comes by.

    Args:
        q: queries of this device.
        k: keys of this device.
        v: values of this device.
        tokens: where they stand; positions None: as the layout has it.
        rules: of the mask.
        inner: mesh axis over which heads are exchanged.
        outer: mesh axis of the ring.
        config: of the ring.
    """
    shared = HeldTokens(
        *(
            None if x is None else jax.lax.all_gather(x, inner, axis=x.ndim - 1, tiled=True)
            for x in tokens
        )
    )
    q, k, v = (
        jax.lax.all_to_all(x, inner, split_axis=2, concat_axis=1, tiled=True) for x in (q, k, v)
    )
    out = attend_ring(q, k, v, shared, rules, axis=outer, config=config.ring)
    return jax.lax.all_to_all(out, inner, split_axis=1, concat_axis=2, tiled=True)
