# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`attend`: self-attention of sequences that may be sharded, in any form.

It opens a region: each form works on the tokens and heads of one device, and sends what it needs
along the mesh axes of `ACT_SEQ_INNER`. Which tokens a device holds is the form's `layout`; the
caller has laid them out (`SequenceForm.token_order`).
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sharding import axes as ax
from sharding.constrain import Placement
from sharding.sequence_parallel.form import Cut, HeldAttention, SequenceForm, TokenOrder
from sharding.sequence_parallel.local_attention import (
    AttentionRules,
    HeldTokens,
    LocalAttention,
    Seen,
    attend_locally,
)


def sequence_ranks(placement: Placement) -> int:
    """Return the devices of the current mesh that share a sequence within a sublayer."""
    sizes = jax.sharding.get_abstract_mesh().shape
    return math.prod(sizes[axis] for axis in placement.mesh_axes(ax.ACT_SEQ_INNER))


def attend(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B S M H"],
    v: Float[Array, "B S M Hv"],
    *,
    placement: Placement,
    config: SequenceForm,
    positions: Int[Array, "B S"] | None,
    segment_ids: Int[Array, "B S"] | None,
    order: TokenOrder | None = None,
    rules: AttentionRules,
) -> tuple[Float[Array, "B S N Hv"], Seen]:
    """Return self-attention of sequences that are laid out as `config` has it.

    Args:
        q: Queries.
        k: Keys.
        v: Values; where sequences are sharded, as wide as the keys.
        placement: Layout rules of the arrays.
        config: Form of sequence parallelism.
        positions: Positions of the tokens, rising within a segment before they were laid out;
            None: each token's place in its row.
        segment_ids: Document of each token, which sees only its own; None: one document a row.
        order: Order of the tokens, where rows differ in it; None: the form's for all rows.
        rules: Mask and kernel.

    Returns:
        The output; and, if observed, for every query the log-sum-exp `lse` and the largest logit
        `top`, f32, without a gradient.
    """
    rows = (ax.ACT_BATCH, ax.ACT_SEQ_INNER)
    heads = (*rows, ax.ACT_HEADS, None)
    kv_heads = (*rows, ax.ACT_KV_HEADS, None)
    if config.layout == "document_zigzag" and not (rules.window is None and rules.chunk is None):
        # Its kernels know the order of tokens by documents without positions, but no distances.
        tokens = config.token_order(q.shape[1], sequence_ranks(placement))
        if order is not None:
            positions = order.by_row
        elif positions is None and tokens is not None:  # rows of one document
            positions = jnp.broadcast_to(jnp.asarray(tokens)[None, :], q.shape[:2])
    arrays = {"positions": positions, "segment_ids": segment_ids}
    token_arrays = {name: array for name, array in arrays.items() if array is not None}
    axes_of_tokens = dict.fromkeys(token_arrays, rows)
    scalars = {} if order is None else order.arrays
    axes = placement.mesh_axes(ax.ACT_SEQ_INNER)
    length = q.shape[1]

    def run(
        q: Array,
        k: Array,
        v: Array,
        token_arrays: dict[str, Array],
        scalars: dict[str, Array],
        *,
        batch_axes: tuple[str, ...],
    ):
        del batch_axes
        tokens = HeldTokens(token_arrays.get("positions"), token_arrays.get("segment_ids"))
        if q.shape[1] == length:
            return attend_locally(LocalAttention(q, k, v, tokens, tokens, rules))
        cut = Cut(axes, length, q.shape[1])
        return config.attend(HeldAttention(q, k, v, tokens, rules, cut, scalars))

    region = placement.region(
        run,
        in_axes=(heads, kv_heads, kv_heads, axes_of_tokens, dict.fromkeys(scalars, ())),
        out_axes=(heads, dict.fromkeys(rules.seen, (ax.ACT_BATCH, ax.ACT_HEADS, ax.ACT_SEQ_INNER))),
    )
    return region(q, k, v, token_arrays, scalars)
