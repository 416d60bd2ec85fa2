# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Plans which device computes which rows in least-loaded expert parallelism.

P devices hold e = E / P experts each; n[g] rows are for expert g, N in all. Nothing is lent
unless the busiest device (or expert) has at least `threshold` times the mean. Then no device should
compute more than

    cap = ceil(capacity_factor * N / P)

rows. Experts are visited from the fullest to the emptiest; one whose device has more than `cap`
gives up the surplus, or all its rows. Among the other devices the least loaded takes as many as it
can, then the next, until everything is placed; but fewer than `min_rows` rows are not worth a copy
of the weights unless they are the last, and where only such places are left one device, the least
loaded, takes all the rest.

A device borrows `slots` experts at most, as shapes are static; one without a free slot is skipped,
and the rest goes to one device only within the bound below. Rows without a place stay on their own
device. So every device computes at most

    max(what its own experts have, cap + (P - 2) (min_rows - 1))

rows, and with enough slots (E - e always are) the second alone: the rest is no more than the free
capacity of the other P - 1 devices together, at most min_rows - 1 on each, and it goes to one of
them.

Rows of an expert are numbered in the order of the sending devices. The computing devices take
consecutive parts in the same order, so that with similar routing on all devices each keeps most of
its own rows. Every device makes the same plan from the same counts, in as many steps as experts are
lent; the plan consists of integers and has no gradient. For the transport of rows and weights see
`jaxmoe/contrib/token_routes/least_loaded.py`.

Source: Least-Loaded Expert Parallelism, arXiv 2601.17111; the slots and the order of parts are
ours. The paper applies its threshold to experts, its code to devices. The ratio of experts is never
smaller; where it alone is reached, no device exceeds `threshold` times the mean.
"""

from __future__ import annotations

import dataclasses
import typing
from fractions import Fraction
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from pallas_kernels.jax_versions import match_varying

ThresholdPer = Literal["device", "expert"]


# Not checked at run time: JAX also fills it with placeholders, where a gradient has none.
@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LoanPlan:
    """Rows that every device computes, and experts that it borrows."""

    rows: Int[Array, "E P"]
    """Rows of each expert on each device."""
    borrowed: Int[Array, "P slots"]
    """Expert in each slot; E in an empty slot."""
    lent: Int[Array, " E"]
    """Every lent expert once, padded with E."""
    num_lent: Int[Array, ""]
    """Number of lent experts."""


class _State(NamedTuple):
    """State of the loop that makes a plan."""

    turn: Int[Array, ""]
    """Turn of the next expert to visit."""
    load: Int[Array, " P"]
    """Rows that each device would compute."""
    used_slots: Int[Array, " P"]
    """Slots in use."""
    plan: LoanPlan


def make_plan(
    loads: Int[Array, " E"],
    *,
    num_devices: int,
    slots: int,
    capacity_factor: float = 1.0,
    min_rows: int = 1024,
    threshold: float = 1.3,
    threshold_per: ThresholdPer = "device",
) -> LoanPlan:
    """Divide the rows of all experts among devices.

    Args:
        loads: Rows of each expert, over all devices.
        num_devices: P, which divides E.
        slots: Experts that a device may borrow.
        capacity_factor: Capacity of a device in even shares, at least 1, rounded to thousandths.
        min_rows: Fewest rows worth borrowing an expert for, at least 1.
        threshold: Largest load over the mean from which experts are lent.
        threshold_per: Load that the threshold is for.
    """
    num_experts = loads.shape[0]
    num_held = loads.shape[0] // num_devices
    owner = jnp.arange(num_experts, dtype=jnp.int32) // jnp.int32(num_held)
    is_owner = owner[:, None] == jnp.arange(num_devices, dtype=jnp.int32)[None, :]
    rows = jnp.where(is_owner, loads.astype(jnp.int32)[:, None], 0)
    cap = _cap(rows.sum(), num_devices, capacity_factor)
    by_load = jnp.argsort(-loads, stable=True)
    turns = jnp.argsort(by_load).astype(jnp.int32)

    def are_waiting(state: _State) -> Bool[Array, " E"]:
        return (turns >= state.turn) & (state.load[owner] > cap) & (loads > 0)

    def spill(state: _State) -> _State:
        expert = jnp.argmin(jnp.where(are_waiting(state), turns, num_experts)).astype(jnp.int32)
        surplus = jnp.minimum(loads[expert], state.load[owner[expert]] - cap)
        is_open = ~is_owner[expert] & (state.used_slots < slots)
        free = jnp.where(is_open, cap - state.load, jnp.iinfo(jnp.int32).min)
        chunk_rows = _place(surplus, free, min_rows)
        return _with(state, expert, chunk_rows, is_owner[expert], turns[expert])

    borrowed = jnp.full((num_devices, slots), num_experts, jnp.int32)
    lent = jnp.full((num_experts,), num_experts, jnp.int32)
    start = _State(
        turn=jnp.where(_is_uneven(rows, threshold, threshold_per), 0, num_experts),
        load=rows.sum(0),
        used_slots=jnp.zeros((num_devices,), jnp.int32),
        plan=LoanPlan(rows, borrowed, lent, jnp.int32(0)),
    )
    start = match_varying(jax.tree.map(lambda part: part.astype(jnp.int32), start), rows)
    return jax.lax.while_loop(lambda state: are_waiting(state).any(), spill, start).plan


def _place(surplus: Int[Array, ""], free: Int[Array, " P"], min_rows: int) -> Int[Array, " P"]:
    """Return how many rows each device takes; none where `free` is not positive."""
    order = jnp.argsort(-jnp.maximum(free, 0), stable=True)
    space = jnp.maximum(free, 0)[order]
    remaining = jnp.maximum(surplus - (jnp.cumsum(space) - space), 0)
    is_worth_it = (space > 0) & ((space >= remaining) | (space >= min_rows))
    chunks = jnp.where(jnp.cumprod(is_worth_it) > 0, jnp.minimum(space, remaining), 0)
    chunk_rows = jnp.zeros_like(free).at[order].set(chunks)
    remaining = surplus - chunk_rows.sum()
    least_loaded = jnp.argmax(free - chunk_rows)
    room = (free - chunk_rows)[least_loaded]
    is_bounded = (room >= 0) & (remaining - room <= (free.shape[0] - 2) * (min_rows - 1))
    return chunk_rows.at[least_loaded].add(jnp.where(is_bounded, remaining, 0))


def _with(
    state: _State,
    expert: Int[Array, ""],
    chunk_rows: Int[Array, " P"],
    is_owner: Bool[Array, " P"],
    turn: Int[Array, ""],
) -> _State:
    """Return the state after these devices have taken rows of an expert from its owner."""
    plan = state.plan
    slots = state.plan.borrowed.shape[1]
    moved = chunk_rows - jnp.where(is_owner, chunk_rows.sum(), 0)
    is_borrower = chunk_rows > 0
    devices = jnp.arange(chunk_rows.shape[0], dtype=jnp.int32)
    slot = jnp.where(is_borrower, state.used_slots, slots)
    is_lent = is_borrower.any()
    place = jnp.where(is_lent, plan.num_lent, plan.lent.shape[0])
    plan = LoanPlan(
        rows=plan.rows.at[expert].add(moved),
        borrowed=plan.borrowed.at[devices, slot].set(expert, mode="drop"),
        lent=plan.lent.at[place].set(expert, mode="drop"),
        num_lent=plan.num_lent + is_lent.astype(jnp.int32),
    )
    used_slots = state.used_slots + is_borrower.astype(jnp.int32)
    return _State(turn + 1, state.load + moved, used_slots, plan)


def _cap(total: Int[Array, ""], num_devices: int, capacity_factor: float) -> Int[Array, ""]:
    """Return ceil(capacity_factor * total / num_devices), in integers: f32 cannot count rows."""
    factor = Fraction(capacity_factor).limit_denominator(1000)
    parts = num_devices * factor.denominator
    quotient = total // parts
    remainder = total % parts
    return quotient * factor.numerator - (-remainder * factor.numerator) // parts


def _is_uneven(
    rows: Int[Array, "E P"], threshold: float, threshold_per: ThresholdPer
) -> Bool[Array, ""]:
    counts = (rows.sum(0) if threshold_per == "device" else rows.sum(1)).astype(jnp.float32)
    largest = counts.max() * jnp.float32(counts.shape[0])
    return largest / jnp.maximum(counts.sum(), 1.0) >= threshold
