# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Turns a schedule table into integer arrays: work, buffer slots and arrivals of every tick.

Each stage has a buffer X of chunk inputs, a buffer G of gradients that arrived from the next stage,
and the last group's stage a buffer H of gradients from the head that wait for B. With deferred
weight gradients each stage has a buffer R of what B leaves for W. Slots are assigned by colouring
the intervals in which an array is kept, on each stage alone, so a buffer is as large as the most
arrays kept at once.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from sharding.pipeline.schedule import Schedule, Stay

PerTick = Int32[np.ndarray, " T"]
PerTickAndStage = Int32[np.ndarray, "T p"]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class Slots:
    """Integers of a schedule for every tick [T], or tick and stage [T p]; -1 for nothing.

    Order of a tick: `g_arrives` is stored, `enter_slot` is stored, F, the head of `leaves` and
    `head_in`, B, `w_in` is stored, W, then `arrives` is stored. One stage is a ring of itself.
    """

    f_chunk: PerTickAndStage
    """Chunk of F."""
    f_micro: PerTickAndStage
    """Micro-batch of F."""
    f_input: PerTickAndStage
    """Slot of X that F reads."""
    b_chunk: PerTickAndStage
    """Chunk of B."""
    b_micro: PerTickAndStage
    """Micro-batch of B."""
    b_input: PerTickAndStage
    """Slot of X that B reads."""
    b_gradient: PerTickAndStage
    """Slot of G that B reads; -1 for the last group, whose gradient is the head's."""
    w_chunk: PerTickAndStage
    """Chunk of W."""
    w_in: PerTickAndStage
    """Slot of R into which B stores what it leaves for W."""
    w_out: PerTickAndStage
    """Slot of R that W reads."""
    arrives: PerTickAndStage
    """Slot of X into which the activation that stage - 1 (in a ring) makes in this tick is stored
    at its end."""
    g_arrives: PerTickAndStage
    """Slot of G into which the gradient that stage + 1 (in a ring) made in the tick before is
    stored at the beginning of this one."""
    head_in: PerTickAndStage
    """Slot of H into which the head's gradient is stored; -1 everywhere if B of the last group is
    always in the tick of its F."""
    head_out: PerTickAndStage
    """Slot of H that B of the last group reads; -1 everywhere as above."""
    enter_slot: PerTickAndStage
    """Slot of X into which the embedding of `enters` is stored at the beginning of the tick."""
    enters: PerTick
    """Micro-batch whose F of group 0 is in this tick."""
    leaves: PerTick
    """Micro-batch whose F of the last group is in this tick."""
    returns: PerTick
    """Micro-batch whose B of group 0 is in this tick."""
    num_inputs: int
    """Slots of X."""
    num_gradients: int
    """Slots of G."""
    num_heads: int
    """Slots of H; 0 if no gradient of the head waits."""
    num_deferred: int
    """Slots of R; 0 without W."""


class _Colours(NamedTuple):
    """Slots of one buffer: {(stage, chunk, micro-batch): slot}, and the most on any stage."""

    slots: dict[tuple[int, int, int], int]
    size: int


def colour(stays: Iterable[Stay]) -> dict[tuple[int, int], int]:
    """Assign slots so that two arrays kept at one time never share one, with the fewest slots.

    Args:
        stays: Arrays and the times during which they are kept.

    Returns:
        {(chunk, micro-batch): slot}.
    """
    slots: dict[tuple[int, int], int] = {}
    busy: list[tuple[int, int]] = []  # (last, slot)
    free: list[int] = []
    for stay in sorted(stays):
        while busy and busy[0][0] < stay.first:
            heapq.heappush(free, heapq.heappop(busy)[1])
        slot = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (stay.last, slot))
        slots[stay.chunk, stay.micro] = slot
    return slots


def _colour_stages(stays: list[list[Stay]]) -> _Colours:
    """Return the slots of a buffer that every stage has, from the stays on each stage."""
    slots = {
        (stage, *key): slot for stage, own in enumerate(stays) for key, slot in colour(own).items()
    }
    return _Colours(slots, max(slots.values(), default=-1) + 1)


def _gradient_stays(schedule: Schedule, stage: int) -> list[Stay]:
    """Return when a stage keeps gradients from other groups: from the tick after B there to B."""
    when = schedule.when
    return [
        Stay(2 * when["B", group + 1, micro] + 1, 2 * when["B", group, micro], chunk, micro)
        for chunk in range(schedule.chunks)
        if (group := schedule.group(stage, chunk)) < schedule.num_groups - 1
        for micro in range(schedule.micro_batches)
    ]


def _head_stays(schedule: Schedule) -> list[Stay]:
    """Return when gradients of the head wait on the last stage; none if none waits."""
    when, last = schedule.when, schedule.num_groups - 1
    stays = [
        Stay(2 * when["F", last, micro], 2 * when["B", last, micro], schedule.chunks - 1, micro)
        for micro in range(schedule.micro_batches)
    ]
    return stays if any(stay.last > stay.first for stay in stays) else []


def plan_slots(schedule: Schedule) -> Slots:
    """Return the integers of a schedule, with the fewest buffer slots.

    Args:
        schedule: Table, with or without B.
    """
    stages = range(schedule.stages)
    inputs = _colour_stages([schedule.input_stays(stage) for stage in stages])
    gradients = _colour_stages(
        [_gradient_stays(schedule, stage) if schedule.has_backward else [] for stage in stages]
    )
    heads = _colour_stages(
        [[] for _ in stages[1:]] + [_head_stays(schedule) if schedule.has_backward else []]
    )
    deferred = _colour_stages([schedule.deferred_stays(stage) for stage in stages])
    by_stage, by_tick = _empty(schedule)
    for tick, stage, (kind, chunk, micro) in schedule.works():
        group, key = schedule.group(stage, chunk), (stage, chunk, micro)
        if kind == "F":
            by_stage["f_chunk"][tick, stage] = chunk
            by_stage["f_micro"][tick, stage] = micro
            by_stage["f_input"][tick, stage] = inputs.slots[key]
            if group == 0:
                by_tick["enters"][tick] = micro
                by_stage["enter_slot"][tick, stage] = inputs.slots[key]
            if group == schedule.num_groups - 1:
                by_tick["leaves"][tick] = micro
                by_stage["head_in"][tick, stage] = heads.slots.get(key, -1)
            else:
                after, its_chunk = schedule.place(group + 1)
                by_stage["arrives"][tick, after] = inputs.slots[after, its_chunk, micro]
        elif kind == "W":
            by_stage["w_chunk"][tick, stage] = chunk
            by_stage["w_out"][tick, stage] = deferred.slots[key]
        else:
            by_stage["w_in"][tick, stage] = deferred.slots.get(key, -1)
            by_stage["b_chunk"][tick, stage] = chunk
            by_stage["b_micro"][tick, stage] = micro
            by_stage["b_input"][tick, stage] = inputs.slots[key]
            by_stage["b_gradient"][tick, stage] = gradients.slots.get(key, -1)
            by_stage["head_out"][tick, stage] = heads.slots.get(key, -1)
            if group == 0:
                by_tick["returns"][tick] = micro
            else:
                before, its_chunk = schedule.place(group - 1)
                by_stage["g_arrives"][tick + 1, before] = gradients.slots[before, its_chunk, micro]
    return Slots(
        **by_stage,
        **by_tick,
        num_inputs=inputs.size,
        num_gradients=gradients.size,
        num_heads=heads.size,
        num_deferred=deferred.size,
    )


def _empty(schedule: Schedule) -> tuple[dict[str, PerTickAndStage], dict[str, PerTick]]:
    """Return arrays of -1 for the fields of `Slots`: by tick and stage, and by tick."""
    ticks = len(schedule.ticks)
    names = [field.name for field in dataclasses.fields(Slots)]
    per_tick = ("enters", "leaves", "returns")
    by_stage = {
        name: np.full((ticks, schedule.stages), -1, np.int32)
        for name in names
        if not name.startswith("num_") and name not in per_tick
    }
    return by_stage, {name: np.full(ticks, -1, np.int32) for name in per_tick}
