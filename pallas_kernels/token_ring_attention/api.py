# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Computes exact attention over a sequence that the ranks of a mesh axis share; queries travel.

Keys and values stay where they are. Queries travel from rank to rank, and the result (out, lse) of
every rank goes home the other way and is merged there (ring/online_softmax.py). Compared with ring
attention, where keys and values travel:

    bytes, all ranks    heads * (2 width b + 4) against 2 key heads * width b, per token and hop
    per link direction  half of the former at a time, since both directions are in use

It suits models with as many query heads as key heads. With 2 query heads per key head both are
equal on full-duplex links; with more, ring attention is better. Steps, bytes and the two forms:
schedule.py. Source: TokenRing, arXiv 2412.20501, which has no backward pass; backward.py adds one.

Positions, segments and windows are masked, and no block is skipped for them: only what causality
hides by the layout is left out. It has no dropout.

To add a form: its name in `Form` and its transfers in `Schedule.homeward` of
`pallas_kernels/token_ring_attention/schedule.py`, its loop in
`pallas_kernels/token_ring_attention/circulate.py`.
"""

import typing
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import Array, Float, Int
from pallas_kernels.backend import Implementation
from pallas_kernels.jax_versions import match_varying
from pallas_kernels.ring import checks
from pallas_kernels.ring.gradient import RingInputs, RingPasses, attend, attend_with_lse
from pallas_kernels.ring.step import Transport
from pallas_kernels.ring_attention.reference import layout_positions
from pallas_kernels.sequence_layout import SequenceLayout
from pallas_kernels.token_ring_attention import backward, forward
from pallas_kernels.token_ring_attention.blocks import Shard
from pallas_kernels.token_ring_attention.circulate import QueryRing
from pallas_kernels.token_ring_attention.schedule import Form, TokenRingSchedule, Visits

NAME = "token_ring_attention"
PASSES = RingPasses(forward.attend, backward.differentiate)


def token_ring_attention(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B S M H"],
    v: Float[Array, "B S M Hv"],
    *,
    axis_name: str,
    causal: bool = True,
    layout: SequenceLayout = "zigzag",
    positions: Int[Array, " S"] | Int[Array, "B S"] | None = None,
    segment_ids: Int[Array, "B S"] | None = None,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    form: Form = "direct",
    transport: Transport = "ppermute",
    implementation: Implementation | None = None,
    returns_lse: bool = False,
) -> Any:
    """Return exact attention of this rank's queries to the keys of all ranks.

    Call it on local shards inside `jax.shard_map`, with check_vma on or off. All arrays, and the
    result, are laid out by `sequence_order(length, ranks, layout)`.

    Args:
        q: Queries of this rank, N heads.
        k: Keys of this rank, M heads; M divides N.
        v: Values of this rank, M heads.
        axis_name: Mesh axis whose ranks share the sequence.
        causal: Whether a query sees no key of a later position.
        layout: Layout of the tokens, as given to `sequence_order`.
        positions: Positions of this rank's tokens; None takes those of the layout. If given, the
            mask compares them and blocks are whole, twice the work of a causal zigzag: give them
            only where positions do not rise along every segment as the layout implies.
        segment_ids: Segments of this rank's tokens; a query sees keys of its own segment only.
        window: Distance from which keys are hidden: a query sees keys less than `window` positions
            away.
        softcap: Bound of the logits: tanh squashes them to (-softcap, softcap).
        scale: Factor of the logits; None is 1 / sqrt(H).
        form: Route of the results: "direct" sends them straight home, for full-mesh links;
            "co_travelling" behind the queries from neighbour to neighbour, for rings and tori.
        transport: "ppermute", or "remote_dma" on a TPU.
        implementation: Implementation of `flash_attention` for a block; None picks the fastest.
        returns_lse: Whether the log-sum-exp is returned too.

    Returns:
        The output [B S N Hv] in the dtype of q; with `returns_lse` a pair of it and the log-sum-exp
        [B N S] in float32, which has a gradient. A query that sees no key has output 0 and
        gradients 0.

    Raises:
        ValueError: Shapes, dtypes or options do not fit, or cannot run here.
    """
    call = checks.check_call(
        NAME,
        (q, k, v),
        (positions, segment_ids),
        (causal, window, softcap, scale),
        axis_name,
        layout,
        transport,
        implementation,
    )
    checks.check_choice(NAME, "form", form, typing.get_args(Form))
    visits: Visits = "every"
    if causal and positions is None:
        visits = "later" if layout == "contiguous" else "halves"
    rank = jax.lax.axis_index(axis_name)
    if not causal and window is None:
        positions = None
    elif window is not None and positions is None:
        positions = layout_positions(call.ranks, q.shape[1], layout)[rank]
    if positions is not None:
        positions = jnp.broadcast_to(positions, q.shape[:2])
    inputs = RingInputs(q, k, v, Shard(positions, segment_ids))
    schedule = TokenRingSchedule(ranks=call.ranks, visits=visits, form=form)
    ring = QueryRing(schedule=schedule, rules=call.rules, links=call.links)
    run = attend_with_lse if returns_lse else attend
    return run(match_varying(inputs, inputs, rank), ring, PASSES)
