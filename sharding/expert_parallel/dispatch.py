# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`expert_parallel`: sends rows to their experts and sums the outputs, with any dispatcher.

Called inside a region, on the tokens of one device. Experts are sharded over the mesh axes
`ExpertAxes.expert`, E / P on each device and in order; the hidden units of every expert over
`ExpertAxes.expert_tensor`. The devices of `expert_tensor` share their tokens first and each adds
its part of the outputs:

    x   <- all-gather over expert_tensor                    (n - 1) T D values received
    y    = sum over a token's experts of gate * expert(x)   on the hidden units held here
    y   <- reduce-scatter over expert_tensor                as many values sent

Gathering T tokens instead of their K T rows costs less there, and sends each row n times between
the devices of `expert`. Megatron gathers rows, behind its all-to-all (arXiv 2504.14960, 3).

Where tokens move (`routes.py`) they travel first, with their assignments, and their sums
return last; what is between does not know.

The backward pass finds the tokens, the hidden units of their experts, the order of the rows and
their gates: 2 T D + 4 A F bytes in bf16. It dispatches again, or finds the rows as well
(`Dispatcher.keeps_rows`): 2 A D more. Gates act on the hidden units, so that their gradient needs
no outputs (SonicMoE, arXiv 2512.14080, section 4; Megatron applies them there too).

With chunks, all of this is done for one part of the tokens after the other, and the compiler may
overlap them. Where every device has all experts, rows are sorted locally, whatever the dispatcher.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from pallas_kernels.grouped_swiglu import HIDDEN
from sharding.assignments import Assignments, combine
from sharding.expert_parallel.dispatched import ExpertAxes, Experts, Outgoing
from sharding.expert_parallel.dispatcher import Dispatcher
from sharding.expert_parallel.local import LocalConfig
from sharding.expert_parallel.permute import ORDER
from sharding.expert_parallel.routes import TokenMoves


def expert_parallel(
    x: Float[Array, "T D"],
    assignments: Assignments,
    experts: Experts,
    weights: Any,
    *,
    num_experts: int,
    config: Dispatcher,
    axes: ExpertAxes,
    moves: TokenMoves | None = None,
    reads_tokens: bool = False,
) -> tuple[Float[Array, "T D"], Float[Array, " E"]]:
    """Apply to each token its assigned experts and sum their outputs by gate.

    Args:
        x: Tokens of this device.
        assignments: Assignments of these tokens.
        experts: (weights, rows sorted by expert, group sizes, gates of the rows) -> outputs of
            those experts, times the gates. What the backward pass shall find is named `HIDDEN`.
            Where it reads tokens it has a keyword `indices`.
        weights: Pytree of arrays [e ...] of the experts held here.
        num_experts: E.
        config: The dispatcher.
        axes: Mesh axes over which experts are sharded; none: all are here, and none is needed.
        moves: How the tokens first move between the devices of `axes.expert`; None: they stay.
        reads_tokens: Whether experts read tokens by index where no row travels.

    Returns:
        The sums in the dtype of `x`, 0 for a token without assignment; and per expert the number
        of dropped assignments of these tokens, all 0 unless the dispatcher may drop.
    """
    outgoing = Outgoing(x, assignments, weights, num_experts, axes, reads_tokens)
    if moves is None or not _is_spread(axes):
        return _in_chunks(outgoing, experts, config)
    y, dropped = _in_chunks(moves.send(outgoing), experts, config)
    return moves.undo(y, axes), dropped


def _in_chunks(
    outgoing: Outgoing, experts: Experts, config: Dispatcher
) -> tuple[Float[Array, "T D"], Float[Array, " E"]]:
    """Return the sums and drop counts of all chunks."""
    axes = outgoing.axes
    chunks = config.chunks if _is_spread(axes) else 1
    if chunks == 1:
        return _send_and_return(outgoing, experts, config)
    is_token_major = outgoing.assignments.top_k is not None
    config.check_tokens(outgoing.x.shape[0], is_token_major=is_token_major)
    results = [_send_and_return(part, experts, config) for part in _cut(outgoing, chunks)]
    y, dropped = zip(*results, strict=True)
    return jnp.concatenate(y), jnp.stack(dropped).sum(0)


def _cut(outgoing: Outgoing, number: int) -> list[Outgoing]:
    """Return the tokens in a number of equal parts, each with its assignments."""
    x = outgoing.x
    assignments = outgoing.assignments
    top_k = assignments.top_k
    assert top_k is not None  # checked by `check_tokens`
    size = x.shape[0] // number

    def part(chunk: int) -> Outgoing:
        first = chunk * size
        slots = slice(chunk * size * top_k, (chunk + 1) * size * top_k)
        cut = jax.tree.map(lambda array: array[slots], assignments)
        cut = dataclasses.replace(cut, token_ids=cut.token_ids - jnp.int32(first))
        return dataclasses.replace(outgoing, x=x[first : first + size], assignments=cut)

    return [part(chunk) for chunk in range(number)]


def _send_and_return(
    outgoing: Outgoing, experts: Experts, config: Dispatcher
) -> tuple[Float[Array, "T D"], Float[Array, " E"]]:
    """Return the sums and drop counts of one chunk."""
    axes = outgoing.axes
    shared = axes.all if config.traits.gathers_tokens else axes.expert_tensor
    shared = () if config.traits.has_whole_tokens else shared
    if shared:
        outgoing = _gather_tokens(outgoing, shared)
    dispatcher = config if _is_spread(axes) else LocalConfig()

    def apply(x: Array, assignments: Assignments, weights: Any) -> tuple[Array, Array]:
        own = dataclasses.replace(outgoing, x=x, assignments=assignments, weights=weights)
        sent = dispatcher.dispatch(own)
        gates = checkpoint_name(sent.gates, ORDER)
        if sent.indices is not None:
            y = experts(sent.weights, x, sent.group_sizes, gates, indices=sent.indices)
            return y, sent.dropped
        outputs = sent.undo(experts(sent.weights, sent.rows, sent.group_sizes, gates))
        return combine(outputs, assignments, x.shape[0], is_weighted=True), sent.dropped

    if not dispatcher.keeps_rows:
        policy = jax.checkpoint_policies.save_only_these_names(HIDDEN, ORDER)
        # Loops over layers keep both passes apart. Without one XLA may find the rows of the forward
        # pass, and keep them; a barrier would also make it copy the weights that kernels read.
        apply = jax.checkpoint(apply, policy=policy, prevent_cse=False)
    y, dropped = apply(outgoing.x, outgoing.assignments, outgoing.weights)
    if shared:
        y = jax.lax.psum_scatter(y, shared, scatter_dimension=0, tiled=True)
        dropped = dropped / jax.lax.axis_size(shared)  # each of them counts all their tokens
    elif config.traits.has_whole_tokens and axes.all:
        y = jax.lax.psum(y, axes.all)
    return y, dropped


def _is_spread(axes: ExpertAxes) -> bool:
    """Return whether other devices hold other experts."""
    return jax.lax.axis_size(axes.expert) > 1


def _gather_tokens(outgoing: Outgoing, axes: tuple[str, ...]) -> Outgoing:
    """Return the tokens of all devices of these axes, concatenated in the order of devices."""
    x = outgoing.x
    assignments = outgoing.assignments
    first = jax.lax.axis_index(axes).astype(jnp.int32) * jnp.int32(x.shape[0])
    moved = dataclasses.replace(assignments, token_ids=assignments.token_ids + first)
    x, moved = jax.tree.map(lambda part: jax.lax.all_gather(part, axes, tiled=True), (x, moved))
    return dataclasses.replace(outgoing, x=x, assignments=moved)
