# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The definition of ring attention: dense attention to the keys of all ranks, gathered.

Takes the memory of the whole row of scores and the traffic of an all-gather; gradients are those
that JAX derives.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import Array, Float, Int
from pallas_kernels.flash_attention import reference
from pallas_kernels.flash_attention.mask import Rules, Tokens
from pallas_kernels.sequence_layout import SequenceLayout, sequence_order


def ring_attention(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B S M H"],
    v: Float[Array, "B S M Hv"],
    *,
    axis_name: str,
    causal: bool = True,
    layout: SequenceLayout = "zigzag",
    positions: Int[Array, "*B S"] | None = None,
    segment_ids: Int[Array, "B S"] | None = None,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
) -> Float[Array, "B S N Hv"]:
    """See `pallas_kernels.ring_attention`."""
    rank = jax.lax.axis_index(axis_name)
    if positions is None:
        positions = layout_positions(jax.lax.axis_size(axis_name), q.shape[1], layout)[rank]
    positions = jnp.broadcast_to(positions, q.shape[:2])

    def gather(x: Array) -> Array:
        """Tokens of all ranks: [B U ...]."""
        return jax.lax.all_gather(x, axis_name, axis=1, tiled=True)

    kv_segment_ids = None if segment_ids is None else gather(segment_ids)
    tokens = Tokens(positions, gather(positions), segment_ids, kv_segment_ids)
    rules = Rules(
        causal=causal,
        window=window,
        softcap=softcap,
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
    )
    return reference.flash_attention(q, gather(k), gather(v), tokens, rules)[0]


def layout_positions(ranks: int, width: int, layout: SequenceLayout) -> Int[Array, "ranks S"]:
    """Of all ranks' tokens, numbers that rise as the tokens of a document do.

    For document_zigzag that is what those of zigzag do; the positions themselves depend on the
    documents, for the other layouts these are the positions.

    Args:
        ranks: N.
        width: tokens of a rank.
        layout: of the tokens.
    """
    order = sequence_order(ranks * width, ranks, layout)
    return jnp.asarray(order, jnp.int32).reshape(ranks, width)
