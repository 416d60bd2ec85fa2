# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The door of token_ring_attention: checks, what visits what, and the gradient by hand.

The sequence is spread over the ranks of a mesh axis. Keys and values stay where they are. Queries
travel from rank to rank, and what every rank makes of them, (out, lse), goes home the other way and
is merged there (online_softmax.py). Next to ring attention, where keys and values travel:

    bytes, all ranks    heads * (2 width b + 4) against 2 key heads * width b, per token and hop
    per link direction  half of the former at a time, since both directions are in use

so that it is for models whose queries have as many heads as their keys; with 2 query heads to a key
head both are equal on full-duplex links, and with more ring attention is better. Steps, bytes and
the two forms: schedule.py. Source: TokenRing, arXiv 2412.20501; the backward pass is ours.

It masks what positions, segments and windows hide, and skips no block for their sake: only what
causality hides by the layout is left out. No dropout, no lse as a result.

To add a form: its ways in schedule.py, how results are passed on in circulate.py.
"""

import functools
import typing

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import Array, Float, Int
from pallas_kernels.backend import Implementation
from pallas_kernels.flash_attention.api import KERNELS
from pallas_kernels.flash_attention.api import OPERATION as FLASH_ATTENTION
from pallas_kernels.flash_attention.arguments import check_mask
from pallas_kernels.flash_attention.mask import Rules
from pallas_kernels.jax_versions import match_varying
from pallas_kernels.ring import checks
from pallas_kernels.ring.step import Transport, check_transport
from pallas_kernels.ring_attention.reference import layout_positions
from pallas_kernels.sequence_layout import SequenceLayout
from pallas_kernels.token_ring_attention import backward, forward
from pallas_kernels.token_ring_attention.blocks import Shard
from pallas_kernels.token_ring_attention.circulate import Ring
from pallas_kernels.token_ring_attention.schedule import Form, Schedule, Visits


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
) -> Float[Array, "B S N Hv"]:
    """Exact attention over a sequence that is spread over the ranks of a mesh axis.

    Called on local shards inside `jax.shard_map`, with check_vma on or off. All arrays are laid out
    by `sequence_order(length, ranks, layout)`, and so is the result.

    Args:
        q: Local queries, N heads.
        k: Local keys, M heads; M divides N.
        v: Local values, M heads.
        axis_name: The mesh axis over which positions are spread.
        causal: A query sees no key of a later position.
        layout: Which tokens each rank holds.
        positions: Positions of the local tokens, where they do not rise along the sequence of each
            segment as the layout says. They then decide alone who sees whom: blocks are whole and
            masked, twice the work of a causal zigzag. None: those of the layout.
        segment_ids: Documents packed in one sequence see only themselves; of the local tokens.
        window: A query sees keys less than `window` positions away.
        softcap: Squashes the logits to (-softcap, softcap) by tanh.
        scale: Multiplies the logits; None is 1 / sqrt(H).
        form: How results come home: "direct", over several ranks at once, for full-mesh links;
            "co_travelling", behind the queries from neighbour to neighbour, for rings and tori.
        transport: How parcels travel.
        implementation: Of flash_attention, for the blocks; None picks the fastest that runs here.

    Returns:
        out, in the dtype of q. A query that sees nothing has out 0 and gradients 0.

    Raises:
        ValueError: Shapes or options that do not fit, no such axis here, or an implementation that
            cannot run here.
    """
    name = "token_ring_attention"
    ranks = checks.num_ranks(name, axis_name)
    checks.check_arrays(name, q, k, v)
    checks.check_tokens(name, q, positions, segment_ids, ranks)
    check_mask(name, window, softcap)
    for option, value, choices in (("layout", layout, SequenceLayout), ("form", form, Form)):
        if value not in typing.get_args(choices):
            names = ", ".join(map(repr, typing.get_args(choices)))
            raise ValueError(f"{name}: {option}={value!r} must be one of {names}.")
    checks.check_layout(name, q.shape[1], ranks, layout)
    if window is not None and layout == "document_zigzag" and positions is None:
        raise ValueError(
            f"{name}: window={window} counts positions, and with layout='document_zigzag' those "
            "depend on the documents of the whole sequence: give positions, laid out like the "
            "tokens."
        )
    kernels = KERNELS[FLASH_ATTENTION.choose(implementation).implementation]
    check_transport(name, transport, kernels)
    visits: Visits = "every"
    if causal and positions is None:
        visits = "later" if layout == "contiguous" else "halves"
    rank = jax.lax.axis_index(axis_name)
    if not causal and window is None:
        positions = None
    elif window is not None and positions is None:
        positions = layout_positions(ranks, q.shape[1], layout)[rank]
    if positions is not None:
        positions = jnp.broadcast_to(positions, q.shape[:2])

    given = [x for x in (q, k, v, positions, segment_ids, rank) if x is not None]
    q, k, v = (match_varying(x, *given) for x in (q, k, v))
    tokens = (positions, segment_ids)
    shard = Shard(*(None if x is None else match_varying(x, *given) for x in tokens))
    ring = Ring(
        axis_name=axis_name,
        schedule=Schedule(ranks=ranks, visits=visits, form=form),
        rules=Rules(
            causal=causal,
            window=window,
            softcap=softcap,
            scale=q.shape[-1] ** -0.5 if scale is None else scale,
        ),
        transport=transport,
        kernels=kernels,
    )
    return _attend(q, k, v, shard, ring)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(q: Array, k: Array, v: Array, shard: Shard, ring: Ring) -> Array:
    return forward.attend(q, k, v, shard, ring)[0]


def _forward(q, k, v, shard, ring):
    out, lse = forward.attend(q, k, v, shard, ring)
    return out, (q, k, v, shard, out, lse)


def _backward(ring, residuals, d_out):
    q, k, v, shard, out, lse = residuals
    gradients = backward.differentiate(q, k, v, shard, out, lse, d_out, ring)
    return *(d.astype(x.dtype) for d, x in zip(gradients, (q, k, v), strict=True)), None


_attend.defvjp(_forward, _backward)
