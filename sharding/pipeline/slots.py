# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Turns a schedule table into integer arrays: work, buffer slots and arrivals of every tick.

Each stage has a buffer X of chunk inputs, a buffer G of gradients that arrived from other stages,
and the stage of the last group of a path a buffer H of gradients from the head that wait for B.
With deferred weight gradients each stage has a buffer R of what B leaves for W. Slots are assigned
by colouring the intervals in which an array is kept, on each stage alone, so a buffer is as large
as the most arrays kept at once.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int32

from sharding.pipeline.schedule import Schedule, Stay

PerTick = Int32[np.ndarray, " T"]
PerTickAndStage = Int32[np.ndarray, "T p"]
ByHop = tuple[PerTickAndStage, ...]
"""For each of `Schedule.hops`; or for each hop from 1 to `Schedule.num_hops`, where embedding or
head is at one end."""
TicksByHop = tuple[PerTick, ...]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class StageSlots:
    """Integers of a schedule for every tick [T], or tick and stage [T p]; -1 for nothing.

    Order of a tick: `g_arrives` is stored, `enter_slot` is stored, F, the head of `leaves` and
    `head_in`, B, `w_in` is stored, W, then `arrives` is stored. One stage is a ring of itself. What
    has several hops is done for the smallest first.
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
    arrives: ByHop
    """Slot of X into which the activation that stage - hop (in a ring) makes in this tick is stored
    at its end."""
    g_arrives: ByHop
    """Slot of G into which the gradient that stage + hop (in a ring) made in the tick before is
    stored at the beginning of this one."""
    head_in: ByHop
    """Slot of H into which the head's gradient of `leaves` is stored; -1 everywhere if B of the
    last group is always in the tick of its F, and one micro-batch leaves in a tick."""
    head_out: PerTickAndStage
    """Slot of H that B of the last group on a path reads; -1 everywhere as above."""
    enter_slot: ByHop
    """Slot of X into which the embedding of `enters` is stored at the beginning of the tick."""
    enters: TicksByHop
    """Micro-batch whose path begins with group hop - 1, and whose F of it is in this tick."""
    leaves: TicksByHop
    """Micro-batch whose path ends with group num_groups - hop, and whose F of it is in this
    tick."""
    returns: TicksByHop
    """Micro-batch whose path begins with group hop - 1, and whose B of it is in this tick."""
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
        (stage, *key): slot
        for stage, stays_of_stage in enumerate(stays)
        for key, slot in colour(stays_of_stage).items()
    }
    return _Colours(slots, max(slots.values(), default=-1) + 1)


def _gradient_stays(schedule: Schedule, stage: int) -> list[Stay]:
    """Return when a stage keeps gradients from other groups: from the tick after B there to B."""
    when = schedule.when
    stays = []
    for kind, group, micro in when:
        its_stage, chunk = schedule.place(group)
        after = schedule.after(group, micro)
        if kind == "B" and its_stage == stage and after < schedule.num_groups:
            first = 2 * when["B", after, micro] + 1
            last = 2 * when["B", group, micro]
            stays.append(Stay(first, last, chunk, micro))
    return stays


def _head_stays(schedule: Schedule) -> list[list[Stay]]:
    """Return when gradients of the head wait on each stage; none if none waits.

    With several hops they are kept as well, because two may come in one tick.
    """
    when = schedule.when
    stays_of_stages: list[list[Stay]] = [[] for _ in range(schedule.stages)]
    for micro in range(schedule.micro_batches if schedule.has_backward else 0):
        group = schedule.path(micro)[-1]
        stage, chunk = schedule.place(group)
        first = 2 * when["F", group, micro]
        last = 2 * when["B", group, micro]
        stays_of_stages[stage].append(Stay(first, last, chunk, micro))
    waits = any(stay.last > stay.first for stays in stays_of_stages for stay in stays)
    return stays_of_stages if waits or schedule.num_hops > 1 else [[] for _ in stays_of_stages]


def plan_slots(schedule: Schedule) -> StageSlots:
    """Return the integers of a schedule, with the fewest buffer slots.

    Args:
        schedule: Table, with or without B.
    """
    stages = range(schedule.stages)
    inputs = _colour_stages([schedule.input_stays(stage) for stage in stages])
    gradients = _colour_stages([_gradient_stays(schedule, stage) for stage in stages])
    heads = _colour_stages(_head_stays(schedule))
    deferred = _colour_stages([schedule.deferred_stays(stage) for stage in stages])
    fields = _empty(schedule)
    for tick, stage, (kind, chunk, micro) in schedule.works():
        group = schedule.group(stage, chunk)
        key = (stage, chunk, micro)
        before = schedule.before(group, micro)
        after = schedule.after(group, micro)
        hop_in, hop_out = group - before - 1, after - group - 1  # places in fields of the ends
        if kind == "F":
            fields["f_chunk"][tick, stage] = chunk
            fields["f_micro"][tick, stage] = micro
            fields["f_input"][tick, stage] = inputs.slots[key]
            if before < 0:
                fields["enters"][hop_in][tick] = micro
                fields["enter_slot"][hop_in][tick, stage] = inputs.slots[key]
            if after == schedule.num_groups:
                fields["leaves"][hop_out][tick] = micro
                fields["head_in"][hop_out][tick, stage] = heads.slots.get(key, -1)
            else:
                target, its_chunk = schedule.place(after)
                place = schedule.hops.index(schedule.hop(group, after))
                fields["arrives"][place][tick, target] = inputs.slots[target, its_chunk, micro]
        elif kind == "W":
            fields["w_chunk"][tick, stage] = chunk
            fields["w_out"][tick, stage] = deferred.slots[key]
        else:
            fields["w_in"][tick, stage] = deferred.slots.get(key, -1)
            fields["b_chunk"][tick, stage] = chunk
            fields["b_micro"][tick, stage] = micro
            fields["b_input"][tick, stage] = inputs.slots[key]
            fields["b_gradient"][tick, stage] = gradients.slots.get(key, -1)
            fields["head_out"][tick, stage] = heads.slots.get(key, -1)
            if before < 0:
                fields["returns"][hop_in][tick] = micro
            else:
                target, its_chunk = schedule.place(before)
                slot = gradients.slots[target, its_chunk, micro]
                place = schedule.hops.index(schedule.hop(before, group))
                fields["g_arrives"][place][tick + 1, target] = slot
    return StageSlots(
        **fields,
        num_inputs=inputs.size,
        num_gradients=gradients.size,
        num_heads=heads.size,
        num_deferred=deferred.size,
    )


_BETWEEN = ("arrives", "g_arrives")
_AT_ENDS = ("head_in", "enter_slot")
_TICKS_BY_HOP = ("enters", "leaves", "returns")


def _empty(schedule: Schedule) -> dict[str, Any]:
    """Return arrays of -1 for the fields of `StageSlots`."""
    ticks = len(schedule.ticks)
    hops = range(schedule.num_hops)

    def of(name: str) -> Any:
        if name in _TICKS_BY_HOP:
            return tuple(np.full(ticks, -1, np.int32) for _ in hops)
        if name in _BETWEEN:
            return tuple(np.full((ticks, schedule.stages), -1, np.int32) for _ in schedule.hops)
        if name in _AT_ENDS:
            return tuple(np.full((ticks, schedule.stages), -1, np.int32) for _ in hops)
        return np.full((ticks, schedule.stages), -1, np.int32)

    names = (field.name for field in dataclasses.fields(StageSlots))
    return {name: of(name) for name in names if not name.startswith("num_")}
