# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Weights of lent experts to the devices that borrow them, and their gradients home.

One lent expert after the other is summed over the devices of the expert axes, of which all but its
home give 0; who borrows it puts the sum into a slot behind its own experts:

    w[slot] = psum(home ? w[expert] : 0)                 forward
    g[expert] += psum(borrows ? g[slot] : 0)             backward

With W values in an expert and `num_lent` experts lent, each way

    2 (P - 1) / P * num_lent * W * b                     bytes sent by each device

and memory for one expert beside the slots. One hot expert costs the same however many devices help,
where its home would else send P - 1 copies; many experts with one borrower each cost more here, up
to P times. The loop runs `num_lent` times, so that where nothing is lent nothing travels. The
devices that take part in a sum are those of one expert group, whose plan is the same: all run it as
often. Devices of other groups, which differ in `data` or `replica`, may run it more or less often.

Values are those of the given weights: narrower ones travel in fewer bytes. It knows no rows; the
plan is `sharding/expert_parallel/least_loaded_plan.py`. To add another way for weights to travel:
another `_hand_over`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from pallas_kernels.jax_versions import match_varying
from sharding.expert_parallel.least_loaded_plan import Plan


def with_borrowed(weights: Any, plan: Plan, axes: tuple[str, ...]) -> Any:
    """The weights of the experts held here, and behind them those of the borrowed ones.

    Args:
        weights: pytree of arrays [e ...].
        plan: the same on all devices of the axes.
        axes: over which experts lie.

    Returns:
        Pytree of arrays [e + slots ...]; an empty slot is 0.
    """
    weights = jax.tree.map(lambda leaf: match_varying(leaf, plan.num_lent), weights)
    return _borrow(weights, plan, axes)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _borrow(weights: Any, plan: Plan, axes: tuple[str, ...]) -> Any:
    slots = plan.borrowed.shape[1]

    def extended(leaf: Array) -> Array:
        return jnp.pad(leaf, ((0, slots), *((0, 0),) * (leaf.ndim - 1)))

    target = jax.tree.map(extended, weights)
    return _hand_over(weights, target, plan, axes, is_return=False)


def _borrow_forward(weights, plan, axes):
    return _borrow(weights, plan, axes), plan


def _borrow_backward(axes, plan, gradients):
    slots = plan.borrowed.shape[1]
    own = jax.tree.map(lambda leaf: leaf[: leaf.shape[0] - slots], gradients)
    return _hand_over(gradients, own, plan, axes, is_return=True), None


_borrow.defvjp(_borrow_forward, _borrow_backward)


def _hand_over(source: Any, target: Any, plan: Plan, axes: tuple[str, ...], *, is_return: bool):
    """Adds to the target, expert by expert, what the devices that have it in the source give."""
    num_devices, slots = plan.borrowed.shape
    held = plan.rows.shape[0] // num_devices
    device = jax.lax.axis_index(axes).astype(jnp.int32)
    guests = jax.lax.dynamic_index_in_dim(plan.borrowed, device, keepdims=False)

    def hand_over(turn: Int[Array, ""], target: Any) -> Any:
        expert = plan.lent[turn]
        home = (expert // held == device, expert % held)
        is_guest = guests == expert
        slot = jnp.where(is_guest, jnp.arange(slots, dtype=jnp.int32), 0).sum()
        guest = (is_guest.any(), held + slot)
        giver, taker = (guest, home) if is_return else (home, guest)

        def one(source: Array, target: Array) -> Array:
            given = jax.lax.psum(_entry(source, *giver), axes)
            taken = jnp.where(taker[0], given, jnp.zeros_like(given))
            return target.at[taker[1]].add(taken)

        return jax.tree.map(one, source, target)

    return jax.lax.fori_loop(0, plan.num_lent, hand_over, target)


def _entry(source: Array, is_here: Bool[Array, ""], index: Int[Array, ""]) -> Array:
    entry = jax.lax.dynamic_index_in_dim(source, index, keepdims=False)
    return jnp.where(is_here, entry, jnp.zeros_like(entry))
