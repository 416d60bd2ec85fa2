# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Attention on one device: what every form of sequence parallelism calls between its messages.

Positions are compared within a segment only, so that the place of a token in its row serves every
mask, whether documents restart their positions or not.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels import Implementation, flash_attention
from pallas_kernels.flash_attention import largest_logits

Seen = dict[str, Array]
"""What is watched: of every query the log-sum-exp `lse` and the largest logit `top` [B N S]."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AttentionRules:
    """What is the same for all tokens."""

    is_causal: bool = True
    """A query sees no later key."""
    window: int | None = None
    """How many positions back a query sees, itself included; None: all."""
    softcap: float | None = None
    """Logits become softcap * tanh(logits / softcap)."""
    scale: float | None = None
    """Factor on the logits; 1/sqrt(H) when None."""
    implementation: Implementation | None = None
    """Of the kernel."""
    is_observed: bool = False
    """Whether somebody watches the logits."""


class HeldTokens(NamedTuple):
    """Where the tokens stand that a device holds."""

    positions: Int[Array, "B S"] | Int[Array, " S"] | None
    """None: from 0, in order."""
    segment_ids: Int[Array, "B S"] | None
    """None: one segment a row."""


def attend_locally(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B U M H"],
    v: Float[Array, "B U M Hv"],
    queries: HeldTokens,
    keys: HeldTokens,
    rules: AttentionRules,
) -> tuple[Float[Array, "B S N Hv"], Seen]:
    """Attention of the queries at hand over the keys at hand.

    Args:
        q: queries.
        k: keys.
        v: values.
        queries: where they stand.
        keys: likewise.
        rules: of the mask.

    Returns:
        The output; and, if observed, what is watched, without a gradient.
    """
    out, lse, top = attend_part(q, k, v, queries, keys, rules)
    return out, {} if top is None else {"lse": jax.lax.stop_gradient(lse), "top": top}


def attend_part(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B U M H"],
    v: Float[Array, "B U M Hv"],
    queries: HeldTokens,
    keys: HeldTokens,
    rules: AttentionRules,
) -> tuple[Float[Array, "B S N Hv"], Float[Array, "B N S"], Float[Array, "B N S"] | None]:
    """Attention over keys that are not all there are: output, log-sum-exp, and if observed `top`.

    Args:
        q: queries.
        k: keys.
        v: values.
        queries: where they stand.
        keys: likewise.
        rules: of the mask.
    """
    mask = {
        "causal": rules.is_causal,
        "q_positions": queries.positions,
        "kv_positions": keys.positions,
        "q_segment_ids": queries.segment_ids,
        "kv_segment_ids": keys.segment_ids,
        "window": rules.window,
        "softcap": rules.softcap,
        "scale": rules.scale,
    }
    out, lse = flash_attention(q, k, v, **mask, implementation=rules.implementation)
    return out, lse, largest_logits(q, k, **mask) if rules.is_observed else None
