# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Token ring: keys and values stay, queries travel, and their results go home the other way.

See `pallas_kernels.token_ring_attention` for the schedule and the bytes. It is for models with as
many key heads as query heads, on links that carry as much both ways at once.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from jaxtyping import Array, Float

from pallas_kernels import token_ring_attention
from pallas_kernels.ring.step import Transport
from pallas_kernels.sequence_layout import SequenceLayout
from pallas_kernels.token_ring_attention.schedule import Form
from sharding.sequence_parallel.local_attention import AttentionRules, HeldTokens
from sharding.sequence_parallel.ring import along_ring


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TokenRingConfig:
    """Queries travel one way, their results the other."""

    name: ClassVar[str] = "token_ring"

    layout: SequenceLayout = "zigzag"
    """Which tokens a device holds: the r-th of N pieces, the first and last of 2N alike, or those
    of every document."""
    form: Form = "direct"
    """How results come home: over several devices at once, for full-mesh links; or from neighbour
    to neighbour behind the queries, for rings and tori."""
    transport: Transport = "ppermute"
    """How they travel."""


def attend_token_ring(
    q: Float[Array, "B s N H"],
    k: Float[Array, "B s M H"],
    v: Float[Array, "B s M H"],
    tokens: HeldTokens,
    rules: AttentionRules,
    *,
    axis: str,
    config: TokenRingConfig,
) -> Float[Array, "B s N H"]:
    """Attention of the queries held here, which visit every device.

    Args:
        q: queries of this device.
        k: keys of this device.
        v: values of this device.
        tokens: where they stand; positions None: as the layout has it.
        rules: of the mask.
        axis: mesh axis over which sequences are cut.
        config: layout, form and transport.
    """
    return along_ring(token_ring_attention, q, k, v, tokens, rules, axis=axis, config=config)(
        form=config.form
    )
