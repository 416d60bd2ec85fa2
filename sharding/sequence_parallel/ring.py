# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Ring: queries stay, keys and values travel from device to device beside the arithmetic.

See `pallas_kernels.ring_attention` for the schedule and the bytes. It suits few key heads, and any
number of devices.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

from jaxtyping import Array, Float

from pallas_kernels import ring_attention
from pallas_kernels.ring_attention.api import Directions, Transport
from pallas_kernels.sequence_layout import SequenceLayout
from sharding.sequence_parallel.local_attention import AttentionRules, HeldTokens


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RingConfig:
    """Keys and values travel."""

    name: ClassVar[str] = "ring"

    layout: SequenceLayout = "zigzag"
    """Which tokens a device holds: the r-th of N pieces, the first and last of 2N alike, or those
    of every document."""
    directions: Directions = "one"
    """Which way round: all heads one way, or half of them each way, for links that carry as much
    both ways at once."""
    transport: Transport = "ppermute"
    """How they travel: XLA's collectives; or messages of a Pallas kernel, on a TPU."""


def attend_ring(
    q: Float[Array, "B s N H"],
    k: Float[Array, "B s M H"],
    v: Float[Array, "B s M H"],
    tokens: HeldTokens,
    rules: AttentionRules,
    *,
    axis: str,
    config: RingConfig,
) -> Float[Array, "B s N H"]:
    """Attention of the queries held here to keys that come by.

    Args:
        q: queries of this device.
        k: keys of this device.
        v: values of this device.
        tokens: where they stand; positions None: as the layout has it.
        rules: of the mask.
        axis: mesh axis over which sequences are cut.
        config: layout, directions and transport.
    """
    return along_ring(ring_attention, q, k, v, tokens, rules, axis=axis, config=config)(
        directions=config.directions
    )


def along_ring(
    operation: Callable[..., Any],
    q: Float[Array, "B s N H"],
    k: Float[Array, "B s M H"],
    v: Float[Array, "B s M H"],
    tokens: HeldTokens,
    rules: AttentionRules,
    *,
    axis: str,
    config: Any,
) -> Callable[..., Any]:
    """An attention round a ring, with all that is given but what is its own.

    Args:
        operation: `ring_attention` or `token_ring_attention`.
        q: queries of this device.
        k: keys of this device.
        v: values of this device.
        tokens: where they stand.
        rules: of the mask.
        axis: mesh axis over which sequences are cut.
        config: with a layout and a transport.
    """
    return functools.partial(
        operation,
        q,
        k,
        v,
        axis_name=axis,
        causal=rules.is_causal,
        layout=config.layout,
        positions=tokens.positions,
        segment_ids=tokens.segment_ids,
        window=rules.window,
        softcap=rules.softcap,
        scale=rules.scale,
        transport=config.transport,
        implementation=rules.implementation,
    )
