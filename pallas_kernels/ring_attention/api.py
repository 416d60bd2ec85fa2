# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Computes exact attention over a sequence that the ranks of a mesh axis share; keys travel.

    out = softmax(scale * q k^T over the keys of all ranks that a query sees) v

Call it inside `jax.shard_map` on local shards. Tokens are laid out over `axis_name` by
`sequence_order`; see schedule.py for what each layout sends:

    zigzag, document_zigzag   causal: half blocks without a mask of positions, 3/4 of the traffic
    contiguous                causal: whole blocks, half the traffic, uneven work
    any                       with `positions`, a window on a zigzag, or without causality: whole
                              blocks, and all keys visit all ranks

Segment ids, and positions where given, are gathered once: 4 bytes a token, where keys and values
have hundreds. Everything else goes from rank to rank beside the arithmetic.

Source: Ring Attention (arXiv 2310.01889). It has no dropout and no cache; for a few queries, merge
(out, lse) over ranks instead.

To add a form: its name in `Form` and its blocks in `_seen` of
`pallas_kernels/ring_attention/schedule.py`, its condition in `_form` of
`pallas_kernels/ring_attention/api.py`.
"""

import typing
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import Array, Float, Int
from pallas_kernels.backend import Implementation
from pallas_kernels.jax_versions import match_varying
from pallas_kernels.ring import checks
from pallas_kernels.ring.gradient import RingInputs, RingPasses, attend, attend_with_lse
from pallas_kernels.ring.step import AxisName, Transport
from pallas_kernels.ring_attention import backward, forward
from pallas_kernels.ring_attention.reference import layout_positions
from pallas_kernels.ring_attention.schedule import Form, make_schedule
from pallas_kernels.ring_attention.shards import Ids, KeyRing
from pallas_kernels.sequence_layout import SequenceLayout

Directions = Literal["one", "both"]

NAME = "ring_attention"
PASSES = RingPasses(forward.attend, backward.differentiate)


def ring_attention(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B S M H"],
    v: Float[Array, "B S M Hv"],
    *,
    axis_name: AxisName,
    causal: bool = True,
    layout: SequenceLayout = "zigzag",
    positions: Int[Array, "*B S"] | None = None,
    segment_ids: Int[Array, "B S"] | None = None,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    directions: Directions = "one",
    transport: Transport = "ppermute",
    implementation: Implementation | None = None,
    returns_lse: bool = False,
) -> Any:
    """Return exact attention of this rank's queries to the keys of all ranks.

    Args:
        q: Queries of this rank, N heads.
        k: Keys of this rank, M heads; M divides N.
        v: Values of this rank, M heads.
        axis_name: Mesh axis whose ranks share the sequence, or several, the slowest first.
        causal: Whether a query sees no key of a later position.
        layout: Layout of the tokens, as given to `sequence_order`.
        positions: Positions of this rank's tokens; None takes those of the layout. If given, the
            mask compares them and nothing is assumed about the layout, which costs traffic and
            arithmetic: give them only where tokens are in another order.
        segment_ids: Segments of this rank's tokens; a query sees keys of its own segment only. With
            document_zigzag, the ids by which the tokens were laid out, or None if None was used.
        window: Distance from which keys are hidden: a query sees keys less than `window` positions
            away.
        softcap: Bound of the logits: tanh squashes them to (-softcap, softcap).
        scale: Factor of the logits; None is 1 / sqrt(H).
        directions: "both" sends half of the heads each way round, which nearly halves the time on
            a full-duplex link. With "ppermute" a TPU has five messages under way at once, and with
            "both" some of ten wait: measure.
        transport: "ppermute", or "remote_dma" on a TPU.
        implementation: Implementation of `flash_attention` for a block; None picks the fastest.
        returns_lse: Whether the log-sum-exp is returned too.

    Returns:
        The output [B S N Hv] in the dtype of q; with `returns_lse` a pair of it and the log-sum-exp
        [B N S] in float32, which has a gradient. A query that sees no key has output 0.

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
    checks.check_choice(NAME, "directions", directions, typing.get_args(Directions))
    form, reach = _form(call.ranks, q.shape[1], layout, causal, window, positions is not None)
    checks.check_directions(NAME, directions, k.shape[2], form)
    ring = KeyRing(
        schedule=make_schedule(call.ranks, form, directions=directions, reach=reach),
        rules=call.rules,
        is_by_position=positions is not None or window is not None,
        links=call.links,
    )
    operands = (q, k, v, positions, segment_ids, jax.lax.axis_index(axis_name))
    q, k, v = match_varying((q, k, v), operands)
    ids = _ids(positions, segment_ids, ring, layout, (q.shape[0], q.shape[1]))
    run = attend_with_lse if returns_lse else attend
    return run(RingInputs(q, k, v, match_varying(ids, operands)), ring, PASSES)


def _form(
    ranks: int, width: int, layout: SequenceLayout, causal: bool, window: int | None, has_own: bool
) -> tuple[Form, int | None]:
    """Return the form of the schedule, and how many owners back a window reaches."""
    if has_own or not causal:
        return "all", None
    if layout == "contiguous":
        if window is None:
            return "earlier", None
        return "near", min(ranks - 1, -(-(window - 1) // width))
    return ("halves" if window is None else "all"), None


def _ids(
    positions: Array | None,
    segment_ids: Array | None,
    ring: KeyRing,
    layout: SequenceLayout,
    shape: tuple[int, int],
) -> Ids:
    """Return positions and segments of all ranks, as far as the mask needs them."""

    def gather(x: Array) -> Array:
        return jax.lax.all_gather(jnp.broadcast_to(x, shape).astype(jnp.int32), ring.axis_name)

    segments = None if segment_ids is None else gather(segment_ids)
    if not ring.is_by_position:
        return Ids(None, segments)
    if positions is not None:
        return Ids(gather(positions), segments)
    layout_ids = layout_positions(ring.schedule.ranks, shape[1], layout)
    return Ids(jnp.broadcast_to(layout_ids[:, None], (len(layout_ids), *shape)), segments)
