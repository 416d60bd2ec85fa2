# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Attention on one device, called by every form of sequence parallelism.

Positions are compared within a segment only, so the place of a token in its row serves every mask,
whether documents restart their positions or not.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import Implementation, flash_attention
from pallas_kernels.flash_attention import largest_logits

Seen = dict[str, Array]
"""Watched logits: the log-sum-exp `lse` and the largest logit `top` of every query [B N S]."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AttentionRules:
    """Mask and kernel of attention, equal for all tokens."""

    is_causal: bool = True
    """A query sees no later key."""
    window: int | None = None
    """Positions that a query sees, itself included; None: all."""
    chunk: int | None = None
    """Positions of a chunk, whose queries see no other chunk; None: all. Caches compare positions;
    rows without a cache have a segment for each chunk."""
    softcap: float | None = None
    """Logits become softcap * tanh(logits / softcap)."""
    scale: float | None = None
    """Factor on the logits; 1/sqrt(H) when None."""
    implementation: Implementation | None = None
    """Implementation of the kernel."""
    is_observed: bool = False
    """Whether the watched logits are returned."""
    keeps_lse: bool = False
    """Whether `lse` is returned, with its gradient, to merge the output with that of other keys."""

    @property
    def seen(self) -> tuple[str, ...]:
        """Names of the arrays that are returned beside the output."""
        if self.is_observed:
            return ("lse", "top")
        return ("lse",) if self.keeps_lse else ()


class HeldTokens(NamedTuple):
    """Positions and documents of the tokens of a device."""

    positions: Int[Array, "B S"] | Int[Array, " S"] | None
    """None: from 0, in order."""
    segment_ids: Int[Array, "B S"] | None
    """None: one segment a row."""

    @classmethod
    def at(cls, positions: Int[Array, "*B S"], rows: int, rules: AttentionRules) -> HeldTokens:
        """Return tokens of one document a row, with a segment for each chunk.

        Args:
            positions: Positions in the document, of all rows together or of each.
            rows: B.
            rules: Mask.
        """
        if rules.chunk is None:
            return cls(positions, None)
        chunks = positions // jnp.int32(rules.chunk)
        return cls(positions, jnp.broadcast_to(chunks, (rows, positions.shape[-1])))


class LocalAttention(NamedTuple):
    """Queries and keys of one device, and the rules between them."""

    q: Float[Array, "B S N H"]
    k: Float[Array, "B U M H"]
    v: Float[Array, "B U M Hv"]
    queries: HeldTokens
    keys: HeldTokens
    rules: AttentionRules


def attend_locally(attention: LocalAttention) -> tuple[Float[Array, "B S N Hv"], Seen]:
    """Return attention of the queries over the keys of this device.

    Args:
        attention: Queries, keys and rules.

    Returns:
        The output; and, if observed, the watched logits, without a gradient.
    """
    out, lse, top = attend_part(attention)
    seen = {} if top is None else {"lse": jax.lax.stop_gradient(lse), "top": top}
    return out, seen | {"lse": lse} if attention.rules.keeps_lse else seen


def attend_part(
    attention: LocalAttention,
) -> tuple[Float[Array, "B S N Hv"], Float[Array, "B N S"], Float[Array, "B N S"] | None]:
    """Return attention over a part of the keys: output, log-sum-exp, and if observed `top`.

    Args:
        attention: Queries, the part of the keys, and rules.
    """
    q, k, v, queries, keys, rules = attention
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
