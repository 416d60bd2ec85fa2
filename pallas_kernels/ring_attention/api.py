# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The door of ring attention: checks, which form of the schedule, and the gradient.

    out = softmax(scale * q k^T over the keys of all ranks that a query sees) v

Call it inside `jax.shard_map` on local shards. Tokens lie on the ranks of `axis_name` as
`sequence_order` lays them out; see schedule.py for what that saves:

    zigzag, document_zigzag   causal: half blocks without a mask of positions, 3/4 of the traffic
    contiguous                causal: whole blocks, half the traffic, uneven work
    any                       with `positions`, a window on a zigzag, or without causality: whole
                              blocks that all keys travel to

Segment ids, and positions where they are given, are gathered once: 4 bytes a token, where a key
and a value have hundreds. Everything else goes from rank to rank beside the arithmetic.

Sources: Ring Attention (arXiv 2310.01889); grouped-query and the rest as `flash_attention`.
No dropout, no cache: for a few queries gather nothing and merge (out, lse) over ranks instead.

To add a way to travel: ring_step.py. To add a form: schedule.py, and `_form` here.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import Array, Float, Float32, Int
from pallas_kernels.backend import Implementation
from pallas_kernels.flash_attention.api import KERNELS, OPERATION
from pallas_kernels.flash_attention.arguments import check_mask
from pallas_kernels.flash_attention.mask import Rules
from pallas_kernels.jax_versions import match_varying
from pallas_kernels.ring import checks
from pallas_kernels.ring.step import Transport, check_transport
from pallas_kernels.ring_attention import backward, forward
from pallas_kernels.ring_attention.reference import layout_positions
from pallas_kernels.ring_attention.schedule import Form, make_schedule
from pallas_kernels.ring_attention.shards import Ids, Ring
from pallas_kernels.sequence_layout import SequenceLayout

Directions = Literal["one", "both"]

NAME = "ring_attention"


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
    directions: Directions = "one",
    transport: Transport = "ppermute",
    implementation: Implementation | None = None,
) -> Float[Array, "B S N Hv"]:
    """Attention of this rank's queries to the keys of all ranks, exact.

    Args:
        q: Queries of this rank, N heads.
        k: Keys of this rank, M heads; M divides N.
        v: Values of this rank, M heads.
        axis_name: The mesh axis whose ranks share the sequence.
        causal: A query sees no key of a later position.
        layout: How `sequence_order` has laid out the tokens.
        positions: Of this rank's tokens. None is those of the layout. If given, the mask compares
            them and nothing is assumed about the layout, which costs traffic and arithmetic: give
            them only where tokens lie in another order.
        segment_ids: Of this rank's tokens. Documents see only themselves. With document_zigzag,
            those by which the tokens were laid out; None if it was None there.
        window: A query sees keys less than `window` positions away.
        softcap: Squashes the logits to (-softcap, softcap) by tanh.
        scale: Multiplies the logits; None is 1 / sqrt(H).
        directions: "both" sends half of the heads each way round, so that a link that carries both
            ways at once is busy for little more than half the time. By "ppermute" a TPU has five
            messages under way at once, and with "both" some of ten wait: a matter of measuring.
        transport: "ppermute", or "remote_dma" on a TPU.
        implementation: Of `flash_attention`, which does a block; None picks the fastest.

    Returns:
        out, in the dtype of q. A query that sees nothing has out 0.

    Raises:
        ValueError: Shapes, dtypes or options that do not fit, or what cannot run here.
    """
    return ring_attention_with_lse(
        q,
        k,
        v,
        axis_name=axis_name,
        causal=causal,
        layout=layout,
        positions=positions,
        segment_ids=segment_ids,
        window=window,
        softcap=softcap,
        scale=scale,
        directions=directions,
        transport=transport,
        implementation=implementation,
    )[0]


def ring_attention_with_lse(
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
    directions: Directions = "one",
    transport: Transport = "ppermute",
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "B S N Hv"], Float32[Array, "B N S"]]:
    """The same, and the log-sum-exp of every query; with gradients through both.

    Args:
        q: As all of them for `ring_attention`.
        k: Keys.
        v: Values.
        axis_name: Of the mesh.
        causal: Whether.
        layout: Of the tokens.
        positions: Of this rank's tokens.
        segment_ids: Of this rank's tokens.
        window: Of the mask.
        softcap: On the logits.
        scale: Of the logits.
        directions: Round the ring.
        transport: How keys travel.
        implementation: Of `flash_attention`.
    """
    ranks = checks.num_ranks(NAME, axis_name)
    checks.check_arrays(NAME, q, k, v)
    checks.check_tokens(NAME, q, positions, segment_ids, ranks)
    check_mask(NAME, window, softcap)
    checks.check_layout(NAME, q.shape[1], ranks, layout)
    form, reach = _form(ranks, q.shape[1], layout, causal, window, positions is not None)
    checks.check_directions(NAME, directions, k.shape[2], form)
    if window is not None and layout == "document_zigzag" and positions is None:
        raise ValueError(
            f"ring_attention: window={window} counts positions, and with layout='document_zigzag' "
            "those depend on the documents of the whole sequence: give positions, laid out by the "
            "order that laid out the tokens."
        )
    kernels = KERNELS[OPERATION.choose(implementation).implementation]
    check_transport(NAME, transport, kernels)
    is_by_position = positions is not None or window is not None
    ring = Ring(
        schedule=make_schedule(ranks, form, directions=directions, reach=reach),
        rules=Rules(
            causal=causal,
            window=window,
            softcap=softcap,
            scale=q.shape[-1] ** -0.5 if scale is None else scale,
        ),
        is_by_position=is_by_position,
        axis_name=axis_name,
        transport=transport,
        kernels=kernels,
    )
    given = [x for x in (q, k, v, positions, segment_ids) if x is not None]
    given.append(jax.lax.axis_index(axis_name))
    q, k, v = (match_varying(x, *given) for x in (q, k, v))
    ids = _ids(positions, segment_ids, ring, layout, (q.shape[0], q.shape[1]))
    ids = Ids(*(None if x is None else match_varying(x, *given) for x in ids))
    return _attend(q, k, v, ids, ring)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(q: Array, k: Array, v: Array, ids: Ids, ring: Ring) -> tuple[Array, Array]:
    return forward.attend(q, k, v, ids, ring)


def _forward(q, k, v, ids, ring):
    out, lse = forward.attend(q, k, v, ids, ring)
    return (out, lse), (q, k, v, ids, out, lse)


def _backward(ring, residuals, gradients):
    q, k, v, ids, out, lse = residuals
    d_out, d_lse = gradients
    d_q, d_k, d_v = backward.differentiate(q, k, v, ids, out, lse, d_out, d_lse, ring)
    return d_q.astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype), None


_attend.defvjp(_forward, _backward)


def _form(
    ranks: int, width: int, layout: SequenceLayout, causal: bool, window: int | None, has_own: bool
) -> tuple[Form, int | None]:
    """What ranks see of each other, and how many owners back a window reaches."""
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
    ring: Ring,
    layout: SequenceLayout,
    shape: tuple[int, int],
) -> Ids:
    """Those of all ranks, as far as the mask needs them."""

    def gather(x: Array) -> Array:
        return jax.lax.all_gather(jnp.broadcast_to(x, shape).astype(jnp.int32), ring.axis_name)

    segments = None if segment_ids is None else gather(segment_ids)
    if not ring.is_by_position:
        return Ids(None, segments)
    if positions is not None:
        return Ids(gather(positions), segments)
    known = layout_positions(ring.schedule.ranks, shape[1], layout)
    return Ids(jnp.broadcast_to(known[:, None], (len(known), *shape)), segments)
