# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Reference of ring attention: dense attention to the gathered keys of all ranks.

It takes the memory of the whole row of scores and the traffic of an all-gather; JAX derives the
gradients.
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
    """Return what `pallas_kernels.ring_attention` returns."""
    rank = jax.lax.axis_index(axis_name)
    if positions is None:
        positions = layout_positions(jax.lax.axis_size(axis_name), q.shape[1], layout)[rank]
    positions = jnp.broadcast_to(positions, q.shape[:2])

    def gather(x: Array) -> Array:
        """Return the tokens of all ranks [B U ...]."""
        return jax.lax.all_gather(x, axis_name, axis=1, tiled=True)

    kv_segment_ids = None if segment_ids is None else gather(segment_ids)
    tokens = Tokens(positions, gather(positions), segment_ids, kv_segment_ids)
    rules = Rules.of("ring_attention", q, causal, window, softcap, scale)
    return reference.flash_attention(q, gather(k), gather(v), tokens, rules)[0]


def layout_positions(ranks: int, width: int, layout: SequenceLayout) -> Int[Array, "ranks S"]:
    """Return numbers of all ranks' tokens that rise along every document.

    For contiguous and zigzag these are the positions. For document_zigzag, whose positions depend
    on the documents, they are those of zigzag.

    Args:
        ranks: Number of ranks.
        width: Tokens of a rank.
        layout: Layout of the tokens.
    """
    order = sequence_order(ranks * width, ranks, layout)
    return jnp.asarray(order, jnp.int32).reshape(ranks, width)
