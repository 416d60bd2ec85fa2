# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism: where each activation lies, and the vocabulary in parts.

With t devices on the tensor axis (Megatron-LM, arXiv 1909.08053; sequence-sharded norms, arXiv
2205.05198) the residual stream is cut by positions, so that norms and additions are done once:

    residual stream     [B S/t D]     norms, additions, routing
      -> all-gather over t            one for attention, one for the feed-forward layer
    inside a sublayer   [B S  N/t]    heads, hidden units
      -> reduce-scatter over t        one each

Each moves (t - 1) / t of B S D values, and the gradient goes the same ways back. The embedding and
the head are cut by vocabulary; the logits [B S V/t] never travel: the loss needs three f32 numbers
per token (`jaxmoe.training.loss`).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sharding import axes as ax
from sharding.constrain import Placement


def look_up(
    table: Float[Array, "V D"], ids: Int[Array, "B S"], placement: Placement
) -> Float[Array, "B S D"]:
    """Rows of a table that may be cut by vocabulary, laid out as the residual stream.

    Each device takes the rows it has, zeros for the others; a reduce-scatter over positions adds
    them. Other cuts of the table are gathered first.

    Args:
        table: one row per id.
        ids: must lie in [0, V); the caller has checked.
        placement: where arrays lie.
    """
    names = placement.mesh_axes(ax.VOCAB)
    is_scattered = placement.mesh_axes(ax.ACT_SEQ) != placement.mesh_axes(ax.ACT_SEQ_INNER)

    def take(table: Array, ids: Array, *, batch_axes: tuple[str, ...]) -> Array:
        del batch_axes
        if not names:
            return table.at[ids].get(mode="clip")
        ids = ids - jax.lax.axis_index(names).astype(ids.dtype) * ids.dtype.type(table.shape[0])
        is_here = (ids >= 0) & (ids < table.shape[0])
        rows = jnp.where(is_here[..., None], table.at[ids].get(mode="clip"), 0)
        if is_scattered:
            return jax.lax.psum_scatter(rows, names, scatter_dimension=1, tiled=True)
        return jax.lax.psum(rows, names)

    island = placement.island(
        take,
        in_axes=((ax.VOCAB, None), (ax.ACT_BATCH, ax.ACT_SEQ_INNER)),
        out_axes=(ax.ACT_BATCH, ax.ACT_SEQ, None),
    )
    return island(table, ids)
