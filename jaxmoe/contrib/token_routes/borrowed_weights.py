# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Sends weights of lent experts to the devices that borrow them, and their gradients back.

One lent expert after the other is summed over the devices of the expert axes, where all but its
owner give 0; a borrower puts the sum into a slot behind its own experts:

    w[slot] = psum(owner ? w[expert] : 0)                forward
    g[expert] += psum(borrows ? g[slot] : 0)             backward

With W values in an expert and `num_lent` experts lent, each way

    2 (P - 1) / P * num_lent * W * b                     bytes sent by each device

and memory for one expert beside the slots. One hot expert costs the same for any number of
borrowers, where point-to-point copies would send P - 1; many experts with one borrower each cost
more here, up to P times. The loop runs `num_lent` times: where nothing is lent nothing travels. The
devices of one sum are those of one expert group, which have the same plan and run the loop equally
often. Devices of other groups, which differ in `data` or `replica`, may run it more or less often.

Weights travel in their own dtype. The plan is `jaxmoe/contrib/token_routes/least_loaded_plan.py`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxmoe.contrib.token_routes.least_loaded_plan import LoanPlan
from pallas_kernels.jax_versions import match_varying


def with_borrowed(weights: Any, plan: LoanPlan, axes: tuple[str, ...]) -> Any:
    """Return the weights of the experts held here, followed by those of the borrowed ones.

    Args:
        weights: Pytree of arrays [e ...].
        plan: The plan, equal on all devices of the axes.
        axes: Mesh axes over which experts are sharded.

    Returns:
        Pytree of arrays [e + slots ...]; an empty slot is 0.
    """
    return _borrow(match_varying(weights, plan.num_lent), plan, axes)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _borrow(weights: Any, plan: LoanPlan, axes: tuple[str, ...]) -> Any:
    slots = plan.borrowed.shape[1]

    def extend(leaf: Array) -> Array:
        return jnp.pad(leaf, ((0, slots), *((0, 0),) * (leaf.ndim - 1)))

    target = jax.tree.map(extend, weights)
    return _hand_over(weights, target, plan, axes, is_return=False)


def _borrow_forward(weights, plan, axes):
    return _borrow(weights, plan, axes), plan


def _borrow_backward(axes, plan, gradients):
    slots = plan.borrowed.shape[1]
    own_gradients = jax.tree.map(lambda leaf: leaf[: leaf.shape[0] - slots], gradients)
    return _hand_over(gradients, own_gradients, plan, axes, is_return=True), None


_borrow.defvjp(_borrow_forward, _borrow_backward)


def _hand_over(source: Any, target: Any, plan: LoanPlan, axes: tuple[str, ...], *, is_return: bool):
    """Return the target plus, expert by expert, the sum of the entries in the source."""
    num_devices, slots = plan.borrowed.shape
    num_held = plan.rows.shape[0] // num_devices
    device = jax.lax.axis_index(axes).astype(jnp.int32)
    guests = jax.lax.dynamic_index_in_dim(plan.borrowed, device, keepdims=False)

    def hand_over(turn: Int[Array, ""], target: Any) -> Any:
        expert = plan.lent[turn]
        owner = (expert // num_held == device, expert % num_held)
        is_guest = guests == expert
        slot = jnp.where(is_guest, jnp.arange(slots, dtype=jnp.int32), 0).sum()
        guest = (is_guest.any(), num_held + slot)
        giver, taker = (guest, owner) if is_return else (owner, guest)

        def one(source: Array, target: Array) -> Array:
            sent_entry = jax.lax.psum(_entry(source, *giver), axes)
            received_entry = jnp.where(taker[0], sent_entry, jnp.zeros_like(sent_entry))
            return target.at[taker[1]].add(received_entry)

        return jax.tree.map(one, source, target)

    return jax.lax.fori_loop(0, plan.num_lent, hand_over, target)


def _entry(source: Array, is_here: Bool[Array, ""], index: Int[Array, ""]) -> Array:
    entry = jax.lax.dynamic_index_in_dim(source, index, keepdims=False)
    return jnp.where(is_here, entry, jnp.zeros_like(entry))
