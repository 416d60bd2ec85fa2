# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Builds the timetable of micro-batches on paths of their own: each work in the first free slot.

In a tick a stage does F of the first micro-batch that waits for it, and B likewise. B of the last
group on a path may be in the tick of its F.

Micro-batches keep their order where sums over them depend on it: in B of each group, when they
leave the last group of their paths, and when their backward passes end. Where two of them leave or
end in one tick, the later one has the larger hop, which is executed after the other.

Source: SkipPipe (arXiv 2502.19913), whose schedules also avoid two works of a stage at one time.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Hashable, Iterator
from typing import NamedTuple

from sharding.pipeline.schedule import Kind, Paths, Schedule
from sharding.pipeline.times import from_times


class _ArrivalStep(NamedTuple):
    """One work on the way of a micro-batch."""

    kind: Kind
    group: int
    turns: tuple[Hashable, ...]
    """Orders of micro-batches that it keeps."""
    hop: int
    """Groups from this one to the embedding or the head, if it is the last of its kind; or 0."""


def first_come_schedule(name: str, stages: int, chunks: int, paths: Paths) -> Schedule:
    """Return the table of micro-batches on given paths.

    Args:
        name: Name for messages.
        stages: Stages of the pipeline.
        chunks: Chunks of layers on each stage.
        paths: Groups that each micro-batch passes through.
    """
    times: dict[tuple[Kind, int, int, int], int] = {}
    ways = [list(_way(path, stages * chunks)) for path in paths]
    waiting = _Waiting.of(ways)
    tick = 0
    done = [0] * len(ways)
    ready = [0] * len(ways)
    unfinished = [micro for micro, way in enumerate(ways) if way]
    while unfinished:
        for kind in ("F", "B"):
            busy = set()
            for micro in unfinished:
                if done[micro] == len(ways[micro]) or ready[micro] > tick:
                    continue
                step = ways[micro][done[micro]]
                chunk, stage = divmod(step.group, stages)
                if step.kind != kind or stage in busy or not waiting.take(micro, step, tick):
                    continue
                busy.add(stage)
                times[kind, stage, chunk, micro] = tick
                done[micro] += 1
                ready[micro] = tick + (kind == "B" or not step.hop)
        unfinished = [micro for micro in unfinished if done[micro] < len(ways[micro])]
        tick += 1
    return from_times(name, stages, chunks, len(paths), times, paths)


@dataclasses.dataclass(frozen=True, slots=True)
class _Waiting:
    """Micro-batches that have not had their turn, by order that is kept."""

    micros: dict[Hashable, collections.deque[int]]
    last: dict[Hashable, tuple[int, int]]
    """Tick and hop of the last turn."""

    @classmethod
    def of(cls, ways: list[list[_ArrivalStep]]) -> _Waiting:
        """Return all micro-batches in the order of their numbers."""
        queues: dict[Hashable, collections.deque[int]] = collections.defaultdict(collections.deque)
        for micro, way in enumerate(ways):
            for step in way:
                for turn in step.turns:
                    queues[turn].append(micro)
        return cls(queues, {})

    def take(self, micro: int, step: _ArrivalStep, tick: int) -> bool:
        """Take the turns of a work, if the micro-batch has all of them; return whether it has."""
        for turn in step.turns:
            then, hop = self.last.get(turn, (-1, 0))
            if self.micros[turn][0] != micro or (then == tick and hop > step.hop):
                return False
        for turn in step.turns:
            self.micros[turn].popleft()
            self.last[turn] = tick, step.hop
        return True


def _way(path: tuple[int, ...], groups: int) -> Iterator[_ArrivalStep]:
    """Yield the works of a micro-batch in order."""
    for group in path:
        is_last = group == path[-1]
        yield _ArrivalStep("F", group, ("leaves",) * is_last, (groups - group) * is_last)
    for group in reversed(path):
        is_last = group == path[0]
        turns = (("B", group), *(("returns",) * is_last))
        yield _ArrivalStep("B", group, turns, (group + 1) * is_last)
