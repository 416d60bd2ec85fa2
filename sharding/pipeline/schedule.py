# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Schedule tables of pipelines: which stage does which work in which tick.

A tick is a forward slot, a backward slot and a slot for weights, and all stages pass through it
together. F is the forward pass of one micro-batch through one chunk of layers, B the backward pass.
W is the part of the backward pass that gives the gradients of the weights, in schedules that defer
it; B is then without it. An activation reaches the next stage at the end of its tick, a gradient at
the beginning of the next tick.

A group is the layers that one stage holds as one chunk. Groups go round the stages:
group = chunk * stages + stage.

A micro-batch passes through all groups in order, or through those on its path in the order of the
path. Its hop to the next group counts stages in their ring. The embedding counts as the group
before the first, and the head as the one after the last; hops from and to these count groups.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import string
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

Kind = Literal["F", "B", "W"]
KINDS: tuple[Kind, ...] = ("F", "B", "W")
"""Kinds of work in the order in which a tick does them."""

Paths = tuple[tuple[int, ...], ...]
"""Groups of layers that each micro-batch passes through, in their order."""


class StageWork(NamedTuple):
    """Work of one stage in one tick."""

    kind: Kind
    """F: forward pass; B: backward pass; W: gradients of weights that B left out."""
    chunk: int
    micro: int
    """Micro-batch."""


class PassRun(NamedTuple):
    """Consecutive ticks with the same kinds of work."""

    kinds: str
    """Kinds that some stage does, as FB."""
    first: int
    """First tick."""
    length: int
    """Ticks."""


class Stay(NamedTuple):
    """Time during which a stage keeps an array, both ends included.

    Times count half ticks: 2 t is during tick t, 2 t + 1 between it and the next.
    """

    first: int
    last: int
    chunk: int
    micro: int


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Timetable of a pipeline; see sharding/pipeline/times.py."""

    name: str
    stages: int
    chunks: int
    micro_batches: int
    ticks: tuple[tuple[tuple[StageWork, ...], ...], ...]
    """Works by [tick][stage], in the order of `KINDS`."""
    paths: Paths | None = None
    """Groups that each micro-batch passes through; None for all."""

    def group(self, stage: int, chunk: int) -> int:
        """Return the group that a stage holds as a chunk."""
        return chunk * self.stages + stage

    def place(self, group: int) -> tuple[int, int]:
        """Return the (stage, chunk) that holds a group."""
        chunk, stage = divmod(group, self.stages)
        return stage, chunk

    @property
    def num_groups(self) -> int:
        """Number of groups of layers."""
        return self.stages * self.chunks

    def path(self, micro: int) -> tuple[int, ...]:
        """Return the groups that a micro-batch passes through, in order."""
        return tuple(range(self.num_groups)) if self.paths is None else self.paths[micro]

    @functools.cached_property
    def _neighbours(self) -> Mapping[tuple[int, int], tuple[int, int]]:
        """{(micro-batch, group): group before, group after}, on the path of the micro-batch."""
        neighbours = {}
        for micro in range(self.micro_batches):
            path = (-1, *self.path(micro), self.num_groups)
            for before, group, after in zip(path, path[1:], path[2:], strict=False):
                neighbours[micro, group] = before, after
        return MappingProxyType(neighbours)

    def passes(self, group: int, micro: int) -> bool:
        """Return whether a micro-batch passes through a group."""
        return (micro, group) in self._neighbours

    def before(self, group: int, micro: int) -> int:
        """Return the group before on the path of a micro-batch; -1 for its first."""
        return self._neighbours[micro, group][0]

    def after(self, group: int, micro: int) -> int:
        """Return the group after on the path of a micro-batch; `num_groups` for its last."""
        return self._neighbours[micro, group][1]

    @functools.cached_property
    def num_hops(self) -> int:
        """Largest hop of a micro-batch from the embedding, or to the head."""
        paths = [self.path(micro) for micro in range(self.micro_batches)]
        return max(max(path[0] + 1, self.num_groups - path[-1]) for path in paths)

    @functools.cached_property
    def hops(self) -> tuple[int, ...]:
        """Hops of micro-batches from group to group, each in [0, stages) of the ring."""
        ways = ((group, after) for (_, group), (_, after) in self._neighbours.items())
        return tuple(sorted({self.hop(*way) for way in ways if way[1] < self.num_groups}))

    def hop(self, group: int, after: int) -> int:
        """Return the stages from one group to another in the ring, in [0, stages)."""
        return (after - group) % self.stages

    def works(self) -> Iterator[tuple[int, int, StageWork]]:
        """Yield every (tick, stage, work) of the table."""
        for tick, row in enumerate(self.ticks):
            for stage, works in enumerate(row):
                for work in works:
                    yield tick, stage, work

    @functools.cached_property
    def when(self) -> Mapping[tuple[Kind, int, int], int]:
        """{(kind, group, micro-batch): tick}.

        Raises:
            ValueError: A work stands in the table twice.
        """
        steps: dict[tuple[Kind, int, int], int] = {}
        for tick, stage, work in self.works():
            key = (work.kind, self.group(stage, work.chunk), work.micro)
            if key in steps:
                raise ValueError(f"{self._say(key)} is in ticks {steps[key]} and {tick}")
            steps[key] = tick
        return MappingProxyType(steps)

    @functools.cached_property
    def has_backward(self) -> bool:
        """Whether there is any B."""
        return any(work.kind == "B" for _, _, work in self.works())

    @functools.cached_property
    def has_deferred(self) -> bool:
        """Whether there is any W."""
        return any(work.kind == "W" for _, _, work in self.works())

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Kinds of work of the table."""
        return KINDS[: 1 + self.has_backward + self.has_deferred]

    def check(self) -> None:
        """Check that each work is done once, on its stage, after the works that it needs.

        F of a group needs F of the group before in an earlier tick. B of a group needs B of the
        group after in an earlier tick; B of the last group needs its own F in the same tick or an
        earlier one. W needs its own B in the same tick or an earlier one. Groups before and after
        are those on the path of the micro-batch.

        Raises:
            ValueError: A work is missing, unknown, repeated, too early, not on the path of its
                micro-batch, or a stage has two works of one kind in a tick.
        """
        self._check_rows()
        for kind, group, micro in itertools.product(
            self.kinds, range(self.num_groups), range(self.micro_batches)
        ):
            key = (kind, group, micro)
            if not self.passes(group, micro):
                if key in self.when:
                    raise ValueError(f"{self._say(key)} is not on its path")
                continue
            if key not in self.when:
                raise ValueError(f"{self._say(key)} is missing")
            before = self.before(group, micro)
            after = self.after(group, micro)
            if kind == "F" and before >= 0:
                self._check_after(key, ("F", before, micro), is_same_tick_allowed=False)
            if kind == "B" and after < self.num_groups:
                self._check_after(key, ("B", after, micro), is_same_tick_allowed=False)
            if kind == "B" and after == self.num_groups:
                self._check_after(key, ("F", group, micro), is_same_tick_allowed=True)
            if kind == "W":
                self._check_after(key, ("B", group, micro), is_same_tick_allowed=True)

    def _check_rows(self) -> None:
        """Check sizes, numbers and the order of works in each tick."""
        if min(self.stages, self.chunks, self.micro_batches) < 1:
            raise ValueError(
                f"{self.name}: stages={self.stages}, chunks={self.chunks} and"
                f" micro_batches={self.micro_batches} must be at least 1"
            )
        if self.paths is not None:
            self._check_paths(self.paths)
        for tick, row in enumerate(self.ticks):
            where = f"{self.name}: tick {tick}"
            if len(row) != self.stages:
                raise ValueError(f"{where} has {len(row)} stages instead of {self.stages}")
            for stage, works in enumerate(row):
                kinds = [work.kind for work in works]
                if kinds != [kind for kind in KINDS if kind in kinds]:
                    raise ValueError(
                        f"{where}, stage {stage} has {kinds}: at most one F, then at most one B,"
                        " then at most one W"
                    )
                for work in works:
                    if not (0 <= work.chunk < self.chunks and 0 <= work.micro < self.micro_batches):
                        raise ValueError(
                            f"{where}, stage {stage} has chunk {work.chunk} of micro-batch"
                            f" {work.micro}, of {self.chunks} chunks and {self.micro_batches}"
                            " micro-batches"
                        )

    def _check_paths(self, paths: Paths) -> None:
        """Check the number of the paths, and that each has groups, none of them twice."""
        if len(paths) != self.micro_batches:
            raise ValueError(
                f"{self.name}: there are paths of {len(paths)} micro-batches, and"
                f" {self.micro_batches} micro-batches"
            )
        for micro, path in enumerate(paths):
            if not path:
                raise ValueError(f"{self.name}: the path of micro-batch {micro} has no group")
            if len({*path}) < len(path) or not {*path} <= {*range(self.num_groups)}:
                raise ValueError(
                    f"{self.name}: the path of micro-batch {micro}, {path}, must have each of the"
                    f" groups 0 to {self.num_groups - 1} at most once"
                )

    def _check_after(
        self,
        key: tuple[Kind, int, int],
        needed: tuple[Kind, int, int],
        *,
        is_same_tick_allowed: bool,
    ) -> None:
        """Check that one work is in the table, and before another."""
        if needed not in self.when:
            raise ValueError(f"{self._say(needed)} is missing")
        if self.when[key] < self.when[needed] + (not is_same_tick_allowed):
            raise ValueError(
                f"{self._say(key)} is in tick {self.when[key]}, and needs"
                f" {needed[0]} of group {needed[1]}, which is in tick {self.when[needed]}"
            )

    def _say(self, key: tuple[Kind, int, int]) -> str:
        kind, group, micro = key
        return f"{self.name}: {kind} of group {group}, micro-batch {micro}"

    def seconds(self, forward: float = 1.0, backward: float = 3.0, weights: float = 1.0) -> float:
        """Return the time of the table. A kind that any stage does in a tick costs all stages.

        The defaults count products: a backward pass has those of the forward pass again, and for
        each of them one for the stream and one for weights.

        Args:
            forward: Time of F of one micro-batch through all chunks of a stage.
            backward: Time of its backward pass likewise: of B, or of B and W.
            weights: Time of W, if there is any.
        """
        weights = weights if self.has_deferred else 0.0
        costs = {"F": forward, "B": backward - weights, "W": weights}
        return sum(run.length * sum(costs[kind] for kind in run.kinds) for run in self.runs()) / (
            self.chunks
        )

    def bubble(self, forward: float = 1.0, backward: float = 3.0, weights: float = 1.0) -> float:
        """Return idle over useful time; the arguments are those of `seconds`."""
        num_passes = len(self._neighbours) / self.num_groups  # micro-batches through all groups
        useful = num_passes * (forward + (backward if self.has_backward else 0.0))
        return self.seconds(forward, backward, weights) / useful - 1.0

    @property
    def idle_share(self) -> float:
        """Idle over total time of a stage, with the default times of `seconds`."""
        bubble = self.bubble()
        return bubble / (1.0 + bubble)

    def input_stays(self, stage: int) -> list[Stay]:
        """Return when a stage keeps the inputs of its chunks.

        An input arrives at the end of the tick of F of the group before; that of the first group,
        the embedding, at the beginning of its own F. It is kept until its own B, without any B
        until its own F.

        Args:
            stage: Number of the stage.
        """
        last = "B" if self.has_backward else "F"
        stays = []
        for group, chunk, micro in self._visits(stage):
            before = self.before(group, micro)
            first = 2 * self.when["F", group, micro]
            if before >= 0:
                first = 2 * self.when["F", before, micro] + 1
            stays.append(Stay(first, 2 * self.when[last, group, micro], chunk, micro))
        return stays

    def deferred_stays(self, stage: int) -> list[Stay]:
        """Return when a stage keeps what B leaves for W: from B to W.

        Args:
            stage: Number of the stage.
        """
        if not self.has_deferred:
            return []
        return [
            Stay(2 * self.when["B", group, micro], 2 * self.when["W", group, micro], chunk, micro)
            for group, chunk, micro in self._visits(stage)
        ]

    def kept(self) -> tuple[int, ...]:
        """Return for each stage the largest number of chunk inputs that it keeps at once."""
        return tuple(most_at_once(self.input_stays(stage)) for stage in range(self.stages))

    def _visits(self, stage: int) -> Iterator[tuple[int, int, int]]:
        """Yield (group, chunk, micro-batch) of all that passes through a stage."""
        for chunk, micro in itertools.product(range(self.chunks), range(self.micro_batches)):
            group = self.group(stage, chunk)
            if self.passes(group, micro):
                yield group, chunk, micro

    def runs(self) -> tuple[PassRun, ...]:
        """Return the table as runs of ticks that do the same kinds of work on some stage."""
        present = (
            "".join(
                kind for kind in KINDS if any(work.kind == kind for works in row for work in works)
            )
            for row in self.ticks
        )
        runs = []
        first = 0
        for kinds, same in itertools.groupby(present):
            length = len(list(same))
            runs.append(PassRun(kinds, first, length))
            first += length
        return tuple(runs)

    def text(self) -> str:
        """Return the timetable as text: a line for each stage, a column for each tick.

        F3b is the forward pass of micro-batch 3 through the second chunk; . is an idle tick.
        """
        cells = [["+".join(map(self._cell, works)) or "." for works in row] for row in self.ticks]
        widths = [max(map(len, row)) for row in cells]
        digits = len(str(self.stages - 1))
        return "\n".join(
            f"stage {stage:<{digits}}  "
            + " ".join(
                row[stage].ljust(width) for row, width in zip(cells, widths, strict=True)
            ).rstrip()
            for stage in range(self.stages)
        )

    def _cell(self, work: StageWork) -> str:
        if self.chunks == 1:
            return f"{work.kind}{work.micro}"
        turns, letter = divmod(work.chunk, 26)
        return f"{work.kind}{work.micro}{string.ascii_lowercase[letter] * (turns + 1)}"


def most_at_once(stays: list[Stay]) -> int:
    """Return the largest number of arrays kept at one time."""
    changes = [(stay.first, 1) for stay in stays] + [(stay.last + 1, -1) for stay in stays]
    return max(itertools.accumulate(change for _, change in sorted(changes)), default=0)
