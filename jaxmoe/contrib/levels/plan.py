# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`Assigner` and its result: groups of documents for each level, cut into micro-batches.

    group         the documents of 2^l devices, at most 2^l C tokens
    micro-batch   rows * N / 2^l groups of one level
    makespan      the sum of the micro-batches, each as long as its slowest group

Groups are packed by best fit in descending order, which leaves all of a level but one more than
half full. So T tokens never need more than 2 T / (rows N C) + (number of levels) micro-batches: the
`buffer` of a step, whose shape is static. Documents then move to the least loaded of these groups
with room for them, if that is faster.
"""

from __future__ import annotations

import abc
import bisect
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from jaxmoe.contrib import levels
from jaxmoe.contrib.levels.cost import LevelCost
from jaxmoe.data.repacking import Assigner
from jaxmoe.planning.abstract_step import StepPlan
from jaxmoe.planning.hardware import Chip
from jaxmoe.training.parts.base import StepPart

if TYPE_CHECKING:
    from jaxmoe.contrib.levels.rows import LevelPacking

Group = tuple[int, ...]
"""Numbers of the documents of a group."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Room:
    """Sizes of a micro-batch."""

    tokens: int
    """Tokens of a device, C."""
    degrees: tuple[int, ...]
    """Devices of a group at each level, ascending; the last share a row."""
    rows: int = 1
    """Rows of a micro-batch, over all devices."""

    @property
    def ranks(self) -> int:
        """Devices that share a row, N."""
        return self.degrees[-1]

    @property
    def length(self) -> int:
        """Tokens of a row, N C."""
        return self.ranks * self.tokens

    def capacity(self, level: int) -> int:
        """Return the tokens of a group."""
        return self.degrees[level] * self.tokens

    def groups(self, level: int) -> int:
        """Return the groups of a micro-batch."""
        return self.rows * self.ranks // self.degrees[level]

    def lowest(self, length: int) -> int:
        """Return the lowest level whose groups hold a document of this length."""
        level = bisect.bisect_left(self.degrees, -(-length // self.tokens))
        if level == len(self.degrees):
            raise ValueError(
                f"a document of {length} tokens is longer than a row of {self.length}: cut it"
            )
        return level

    def buffer(self, accumulation: int) -> int:
        """Return the micro-batches that hold any documents of so many full ones.

        Args:
            accumulation: Micro-batches of `rows` full rows.
        """
        return 2 * accumulation + len(self.degrees)


@dataclasses.dataclass(frozen=True)
class LevelPlan:
    """Groups of every level, in the order of the micro-batches: the highest level first."""

    groups: Mapping[int, tuple[Group, ...]]
    """Groups by level, of whole micro-batches, the slowest first; empty ones fill the last."""

    def micro_batches(self, room: Room) -> list[tuple[int, tuple[Group, ...]]]:
        """Return level and groups of each micro-batch."""
        return [
            (level, groups[start : start + room.groups(level)])
            for level, groups in sorted(self.groups.items(), reverse=True)
            for start in range(0, len(groups), room.groups(level))
        ]

    def seconds(self, lengths: Sequence[int], room: Room, cost: LevelCost) -> float:
        """Return the makespan."""
        return sum(
            cost.micro_batch(cost.attention((lengths[i] for i in groups[0]), level), level)
            for level, groups in self.micro_batches(room)
        )

    def shares(self, lengths: Sequence[int], room: Room) -> tuple[float, ...]:
        """Return the share of the tokens at each level."""
        tokens_by_level = [
            sum(lengths[i] for group in self.groups.get(level, ()) for i in group)
            for level in range(len(room.degrees))
        ]
        return tuple(tokens / max(1, sum(tokens_by_level)) for tokens in tokens_by_level)


class LevelAssigner(Assigner):
    """How the level of each document is chosen."""

    __slots__ = ()

    def repacking(self, plan: StepPlan, chip: Chip) -> LevelPacking:
        """Return the packing by level; see the base class."""
        return levels.level_packing(plan, self, chip)

    @property
    def step_parts(self) -> tuple[StepPart, ...]:
        """Measures of the levels of each step."""
        return (levels.LevelMeasures(),)

    @abc.abstractmethod
    def assign(self, lengths: Sequence[int], room: Room, cost: LevelCost) -> LevelPlan:
        """Return the micro-batches of a step; a pure function of its arguments.

        Args:
            lengths: Tokens of each document, from 1 to those of a row.
            room: Sizes of a micro-batch.
            cost: Seconds of a micro-batch.
        """


def plan_of(
    levels: Sequence[int], lengths: Sequence[int], room: Room, cost: LevelCost
) -> LevelPlan:
    """Return the plan of documents whose levels are known.

    Room that a level leaves is filled with documents of the next lower one if that is faster.

    Args:
        levels: Level of each document.
        lengths: Tokens of each document.
        room: Sizes of a micro-batch.
        cost: Seconds of a micro-batch.
    """
    members: dict[int, list[int]] = {}
    for number, level in enumerate(levels):
        members.setdefault(level, []).append(number)
    plan = LevelPlan(
        {level: pack(documents, lengths, level, room, cost) for level, documents in members.items()}
    )
    best = plan.seconds(lengths, room, cost)
    for level in sorted(members, reverse=True):
        filled = _fill(plan, level, lengths, room, cost)
        if filled is not None and (seconds := filled.seconds(lengths, room, cost)) < best:
            plan = filled
            best = seconds
    return plan


def pack(
    documents: Iterable[int], lengths: Sequence[int], level: int, room: Room, cost: LevelCost
) -> tuple[Group, ...]:
    """Return the groups of a level for whole micro-batches, the slowest first.

    Args:
        documents: Numbers of the documents.
        lengths: Tokens of each document.
        level: Their level.
        room: Sizes of a micro-batch.
        cost: Seconds of a micro-batch.
    """
    order = sorted(documents, key=lambda i: (-lengths[i], i))
    tight, _ = _best_fit(order, lengths, room.capacity(level))
    number = -(-len(tight) // room.groups(level)) * room.groups(level)
    tight += [[] for _ in range(number - len(tight))]
    forms = [tight]
    if (even := _least_loaded(order, lengths, room.capacity(level), number)) is not None:
        forms.append(even)
    ordered = [_slowest_first(form, lengths, level, cost) for form in forms]
    return min(ordered, key=lambda form: LevelPlan({level: form}).seconds(lengths, room, cost))


def _best_fit(
    order: Iterable[int],
    lengths: Sequence[int],
    capacity: int,
    groups: Iterable[Sequence[int]] = (),
    *,
    most: int | None = None,
) -> tuple[list[list[int]], list[int]]:
    """Put each document into the fullest group with room for it, or into a new one.

    Args:
        order: Documents, one after another.
        lengths: Tokens of each document.
        capacity: Tokens of a group.
        groups: Groups to begin with.
        most: Largest number of groups; None for any.

    Returns:
        The groups, and the documents that found no room.
    """
    filled = [list(group) for group in groups]
    unplaced = []
    free = sorted((capacity - sum(lengths[i] for i in g), n) for n, g in enumerate(filled))
    for i in order:
        place = bisect.bisect_left(free, (lengths[i], -1))
        if place < len(free):
            room, number = free.pop(place)
        elif most is None or len(filled) < most:
            room = capacity
            number = len(filled)
            filled.append([])
        else:
            unplaced.append(i)
            continue
        filled[number].append(i)
        bisect.insort(free, (room - lengths[i], number))
    return filled, unplaced


def _least_loaded(
    order: Iterable[int], lengths: Sequence[int], capacity: int, number: int
) -> list[list[int]] | None:
    """Put each document into the least loaded group with room; None if one finds no room."""
    groups: list[list[int]] = [[] for _ in range(number)]
    free = [capacity] * number
    pairs = [0] * number
    for i in order:
        fitting = [n for n in range(number) if free[n] >= lengths[i]]
        if not fitting:
            return None
        chosen = min(fitting, key=lambda n: (pairs[n], n))
        groups[chosen].append(i)
        free[chosen] -= lengths[i]
        pairs[chosen] += lengths[i] * (lengths[i] + 1)
    return groups


def _slowest_first(
    groups: Iterable[Sequence[int]], lengths: Sequence[int], level: int, cost: LevelCost
) -> tuple[Group, ...]:
    """Return the groups in descending order of their attention."""

    def seconds(group: Sequence[int]) -> float:
        return cost.attention((lengths[i] for i in group), level)

    return tuple(sorted(map(tuple, groups), key=seconds, reverse=True))


def _fill(
    plan: LevelPlan, level: int, lengths: Sequence[int], room: Room, cost: LevelCost
) -> LevelPlan | None:
    """Return the plan with documents of the next lower level in the free room of a level."""
    below = max((lower for lower in plan.groups if lower < level), default=None)
    if below is None or level not in plan.groups:
        return None
    order = sorted((i for g in plan.groups[below] for i in g), key=lambda i: (-lengths[i], i))
    old = plan.groups[level]
    held, unplaced = _best_fit(order, lengths, room.capacity(level), old, most=len(old))
    groups = dict(plan.groups) | {level: _slowest_first(held, lengths, level, cost)}
    del groups[below]
    if unplaced:
        groups[below] = pack(unplaced, lengths, below, room, cost)
    return LevelPlan(groups)
