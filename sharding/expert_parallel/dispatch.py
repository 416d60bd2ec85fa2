# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The seam between routing and experts: `expert_parallel` sends rows to experts and back.

Called inside an island, on the tokens of one device. Experts are spread over the mesh axes
`ExpertAxes.expert`, E / P on each device and in order; the hidden units of every expert over
`ExpertAxes.expert_tensor`. The devices of `expert_tensor` share their tokens first and each adds
its part of the outputs:

    x   <- all-gather over expert_tensor                    (n - 1) T D values received
    y    = sum over a token's experts of gate * expert(x)   on the hidden units held here
    y   <- reduce-scatter over expert_tensor                as many values sent

Gathering T tokens instead of their K T rows costs less there, and sends each row n times between
the devices of `expert`. Megatron gathers rows, behind its all-to-all (arXiv 2504.14960, 3).

To add a backend: a file with its config class (`name`, `spreads_experts`, `gathers_tokens`) and a
function with the signature of `dispatch_locally`, its config into `DispatcherConfig` in
`sharding/expert_parallel/__init__.py`, a line in `_send`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from sharding.assignments import Assignments, combine
from sharding.expert_parallel.dispatched import Dispatched, ExpertAxes, Experts
from sharding.expert_parallel.local import LocalConfig, dispatch_locally


def expert_parallel(
    x: Float[Array, "T D"],
    assignments: Assignments,
    experts: Experts,
    weights: Any,
    *,
    num_experts: int,
    config: LocalConfig,
    axes: ExpertAxes,
) -> tuple[Float[Array, "T D"], Float[Array, " E"]]:
    """Applies to each token its assigned experts and sums their outputs by gate.

    Args:
        x: the tokens of this device.
        assignments: of these tokens.
        experts: (weights, rows sorted by expert, group sizes) -> outputs of those experts.
        weights: pytree of arrays [e ...] of the experts held here.
        num_experts: E.
        config: which backend.
        axes: where experts lie; none: all are here, and no backend is needed.

    Returns:
        The sums in the dtype of `x`, 0 for a token without assignment; and per expert how many
        assignments of these tokens were dropped, all 0 unless the backend is called dropping.
    """
    if not axes.all:
        config = LocalConfig()
    shared = axes.all if config.gathers_tokens else axes.expert_tensor
    if shared:
        x, assignments = _gather_tokens(x, assignments, shared)
    sent = _send(x, assignments, weights, num_experts=num_experts, config=config, axes=axes)
    outputs = sent.undo(experts(sent.weights, sent.rows, sent.group_sizes))
    y, dropped = combine(outputs, assignments, x.shape[0]), sent.dropped
    if shared:
        y = jax.lax.psum_scatter(y, shared, scatter_dimension=0, tiled=True)
        dropped = dropped / jax.lax.axis_size(shared)  # each of them counts all their tokens
    return y, dropped


def _send(
    x: Float[Array, "T D"],
    assignments: Assignments,
    weights: Any,
    *,
    num_experts: int,
    config: LocalConfig,
    axes: ExpertAxes,
) -> Dispatched:
    match config:
        case LocalConfig():
            return dispatch_locally(x, assignments, weights, num_experts=num_experts, axes=axes)


def _gather_tokens(
    x: Float[Array, "t D"], assignments: Assignments, axes: tuple[str, ...]
) -> tuple[Float[Array, "T D"], Assignments]:
    """The tokens of all devices of these axes, one device's behind the other's."""
    first = jax.lax.axis_index(axes).astype(jnp.int32) * jnp.int32(x.shape[0])
    moved = dataclasses.replace(assignments, token_ids=assignments.token_ids + first)
    return jax.tree.map(lambda part: jax.lax.all_gather(part, axes, tiled=True), (x, moved))
