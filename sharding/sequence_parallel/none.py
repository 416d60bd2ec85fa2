# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""No sequence parallelism: every device holds whole sequences, heads may be spread."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels import Implementation, flash_attention
from pallas_kernels.flash_attention import largest_logits
from sharding import axes as ax
from sharding.constrain import Placement


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NoSequenceParallelConfig:
    """Whole sequences on every device; mesh.seq must be 1."""

    name: ClassVar[str] = "none"


def attend_whole_sequences(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B U M H"],
    v: Float[Array, "B U M H"],
    *,
    placement: Placement,
    positions: Int[Array, "B S"] | None,
    segment_ids: Int[Array, "B S"] | None,
    kv_positions: Int[Array, "B U"] | None,
    window: int | None,
    softcap: float | None,
    scale: float | None,
    is_causal: bool = True,
    implementation: Implementation | None,
    is_observed: bool = False,
) -> tuple[Float[Array, "B S N H"], dict[str, Float[Array, "B N S"]]]:
    """Attention on the local shards of batch and heads.

    Args:
        q: queries.
        k: keys; U may exceed S when they come from a cache.
        v: values.
        placement: where arrays lie.
        positions: of the queries; arange when None.
        segment_ids: tokens see only their own segment; None: one segment a row.
        kv_positions: of the keys; those of the queries when None.
        window: how many positions back a query sees, itself included; None: all.
        softcap: logits become softcap * tanh(logits / softcap).
        scale: factor on the logits; 1/sqrt(H) when None.
        is_causal: a query sees no later key.
        implementation: of the kernel.
        is_observed: whether somebody watches the logits.

    Returns:
        The output; and, if observed, of every query the log-sum-exp `lse` and the largest logit
        `top`, f32, without a gradient.
    """
    heads = (ax.ACT_BATCH, None, ax.ACT_HEADS, None)
    kv_heads = (ax.ACT_BATCH, None, ax.ACT_KV_HEADS, None)
    arrays = {"positions": positions, "segment_ids": segment_ids, "kv_positions": kv_positions}
    given = {name: array for name, array in arrays.items() if array is not None}

    def attend(q, k, v, given, *, batch_axes):
        del batch_axes
        q_positions, segments = given.get("positions"), given.get("segment_ids")
        mask = {
            "causal": is_causal,
            "q_positions": q_positions,
            "kv_positions": given.get("kv_positions", q_positions),
            "q_segment_ids": segments,
            "kv_segment_ids": segments,
            "window": window,
            "softcap": softcap,
            "scale": scale,
        }
        out, lse = flash_attention(q, k, v, **mask, implementation=implementation)
        if not is_observed:
            return out, {}
        return out, {"lse": jax.lax.stop_gradient(lse), "top": largest_logits(q, k, **mask)}

    in_axes = (heads, kv_heads, kv_heads, dict.fromkeys(given, (ax.ACT_BATCH, None)))
    seen = ("lse", "top") if is_observed else ()
    out_axes = (heads, dict.fromkeys(seen, (ax.ACT_BATCH, ax.ACT_HEADS, None)))
    island = placement.island(attend, in_axes=in_axes, out_axes=out_axes)
    return island(q, k, v, given)
