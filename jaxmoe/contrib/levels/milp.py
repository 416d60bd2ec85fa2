# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`milp`: levels by an integer linear program over buckets of length.

    x[q, l]   documents of bucket q at level l, where it fits
    k[l]      micro-batches of level l
    t[l]      seconds of attention and rings of level l

    min  sum_l t[l] + other k[l]
    t[l] >= sum_q x[q, l] pair s_q (s_q + 1) / 2 / (rows N)      attention, evenly spread
    t[l] >= ring(l) k[l]
    sum_q x[q, l] mean_q <= k[l] rows N C                         tokens
    sum_q over s_q > c / j  of x[q, l] <= (j - 1) k[l] groups     j = 2, 3; c the tokens of a group

Documents are put into at most 16 buckets by length, so that the lengths rounded up to the largest
of their bucket are least. HiGHS stops after a number of nodes, not after a time, so that all hosts
find the same plan. The documents are then packed by best fit; `buckets` or `zones` is taken if it
is faster.
Source: FlexSP (arXiv 2412.01523).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from jaxmoe.contrib.levels.buckets import BucketsConfig
from jaxmoe.contrib.levels.cost import LevelCost
from jaxmoe.contrib.levels.plan import LevelAssigner, LevelPlan, Room, plan_of
from jaxmoe.contrib.levels.zones import ZonesConfig
from jaxmoe.optional import require
from pallas_kernels.array_types import Float, Int

_GAP = 1e-6
_ROUNDING = 1e-9


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MilpConfig(LevelAssigner):
    """Levels by an integer linear program (FlexSP)."""

    name: ClassVar[str] = "milp"

    buckets: int = 16
    """Largest number of buckets of length."""
    nodes: int = 200
    """Nodes of the search after which the best solution so far is taken."""

    def __post_init__(self):
        for field in ("buckets", "nodes"):
            if getattr(self, field) < 1:
                raise ValueError(
                    f"training.assign.{field}={getattr(self, field)} must be at least 1"
                )

    def assign(self, lengths: Sequence[int], room: Room, cost: LevelCost) -> LevelPlan:
        """Return the micro-batches of a step."""
        simple = BucketsConfig().assign(lengths, room, cost)
        if not lengths or len(room.degrees) == 1:
            return simple
        program = LevelProgram.of(lengths, room, cost, self.buckets)
        counts = program.solve(self.nodes)
        if counts is None:
            return simple
        found = plan_of(program.levels(counts, len(lengths)), lengths, room, cost)
        plans = [found, simple, ZonesConfig().assign(lengths, room, cost)]
        return min(plans, key=lambda plan: plan.seconds(lengths, room, cost))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LevelProgram:
    """The integer linear program of a step."""

    room: Room
    cost: LevelCost
    members: tuple[tuple[int, ...], ...]
    """Documents of each bucket, the longest first."""
    longest: Int[np.ndarray, " Q"]
    """Tokens of the longest document of each bucket."""
    tokens: Float[np.ndarray, " Q"]
    """Mean tokens of the documents of each bucket."""
    pairs: Float[np.ndarray, " Q"]
    """Mean number of (query, key) pairs of the documents of each bucket."""

    @classmethod
    def of(cls, lengths: Sequence[int], room: Room, cost: LevelCost, buckets: int) -> LevelProgram:
        """Return the program of some documents.

        Args:
            lengths: Tokens of each document.
            room: Sizes of a micro-batch.
            cost: Seconds of a micro-batch.
            buckets: Largest number of buckets.
        """
        order = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
        ordered = np.array([lengths[i] for i in order], np.int64)
        ends = bucket_ends(ordered, buckets)
        cut = zip([0, *ends], ends, strict=False)
        members = tuple(tuple(order[start:end][::-1]) for start, end in cut)
        pairs = [np.mean([lengths[i] * (lengths[i] + 1) / 2 for i in m]) for m in members]
        return cls(
            room=room,
            cost=cost,
            members=members,
            longest=np.array([lengths[m[0]] for m in members]),
            tokens=np.array([np.mean([lengths[i] for i in m]) for m in members]),
            pairs=np.array(pairs),
        )

    def seconds(self, counts: Int[np.ndarray, "Q L"]) -> float:
        """Return the least value of the program for given numbers of documents.

        Args:
            counts: Documents of each bucket at each level.
        """
        total = 0.0
        for level in range(len(self.room.degrees)):
            if not counts[:, level].any():
                continue
            needed = [
                math.ceil(float(counts[:, level] @ values) / each - _ROUNDING)
                for values, each in self._limits(level)
            ]
            number = max(1, *needed)
            attention = float(counts[:, level] @ self._attention())
            total += max(attention, number * self.cost.rings[level]) + number * self.cost.other
        return total

    def solve(self, nodes: int) -> Int[np.ndarray, "Q L"] | None:
        """Return the documents of each bucket at each level; None if HiGHS finds no solution.

        Args:
            nodes: Nodes after which the search ends.
        """
        optimize = require("scipy.optimize")
        buckets = len(self.members)
        levels = len(self.room.degrees)
        size = buckets * levels
        sizes = np.array([len(m) for m in self.members], float)
        lowest = np.array([self.room.lowest(int(s)) for s in self.longest])
        allowed = lowest[:, None] <= np.arange(levels)
        zeros = np.zeros(size + 2 * levels)
        rows = []
        low = []
        high = []

        def add(level: int, bucketwise: np.ndarray, k: float, t: float, most: float) -> None:
            row = zeros.copy()
            row[np.arange(buckets) * levels + level] = bucketwise
            row[size + level], row[size + levels + level] = k, t
            rows.append(row)
            low.append(-np.inf)
            high.append(most)

        for level in range(levels):
            add(level, self._attention(), 0.0, -1.0, 0.0)
            add(level, np.zeros(buckets), self.cost.rings[level], -1.0, 0.0)
            for values, each in self._limits(level):
                add(level, np.asarray(values, float), -float(each), 0.0, 0.0)
        for bucket in range(buckets):
            row = zeros.copy()
            row[bucket * levels : (bucket + 1) * levels] = 1
            rows.append(row)
            low.append(sizes[bucket])
            high.append(sizes[bucket])
        objective = np.concatenate(
            [np.zeros(size), np.full(levels, self.cost.other), np.ones(levels)]
        )
        scale = 1 / max(self.cost.other, 1e-30)
        upper = np.concatenate([(sizes[:, None] * allowed).ravel(), np.full(2 * levels, np.inf)])
        solution = optimize.milp(
            objective * scale,
            constraints=optimize.LinearConstraint(np.array(rows), low, high),
            bounds=optimize.Bounds(0, upper),
            integrality=np.concatenate([np.ones(size + levels), np.zeros(levels)]),
            options={"node_limit": nodes, "mip_rel_gap": _GAP},
        )
        if solution.x is None:
            return None
        return np.rint(solution.x[:size]).astype(np.int64).reshape(buckets, levels)

    def levels(self, counts: Int[np.ndarray, "Q L"], number: int) -> list[int]:
        """Return the level of each document: in a bucket the longest have the highest.

        Args:
            counts: Documents of each bucket at each level.
            number: Documents.
        """
        chosen = [0] * number
        for members, row in zip(self.members, counts, strict=True):
            highest_first = [
                level for level in reversed(range(len(row))) for _ in range(int(row[level]))
            ]
            for document, level in zip(members, highest_first, strict=True):
                chosen[document] = level
        return chosen

    def _attention(self) -> Float[np.ndarray, " Q"]:
        """Return the seconds of a document of each bucket, spread over a whole micro-batch."""
        return self.cost.pair * self.pairs / (self.room.rows * self.room.ranks)

    def _limits(self, level: int) -> list[tuple[np.ndarray, int]]:
        """Return what documents take of a micro-batch, and how much of it there is."""
        capacity = self.room.capacity(level)
        groups = self.room.groups(level)
        limits = [(self.tokens, groups * capacity)]
        limits += [((j * self.longest > capacity).astype(int), (j - 1) * groups) for j in (2, 3)]
        return limits


def bucket_ends(ordered: Int[np.ndarray, " n"], buckets: int) -> list[int]:
    """Return the ends of buckets that round lengths up least.

    Args:
        ordered: Lengths, ascending.
        buckets: Largest number of buckets.
    """
    values, starts = np.unique(ordered, return_index=True)
    ends = np.append(starts[1:], len(ordered))
    before = np.concatenate([[0], np.cumsum(ordered)]).astype(float)
    edges = np.append(0, ends)  # documents in the first i distinct lengths
    number = len(values)
    error = np.full(number + 1, np.inf)
    error[0] = 0.0
    choices = []
    for _ in range(min(buckets, number)):
        following = np.full(number + 1, np.inf)
        chosen = np.zeros(number + 1, int)
        for i in range(1, number + 1):
            padded = values[i - 1] * (edges[i] - edges[:i]) - (before[edges[i]] - before[edges[:i]])
            total = error[:i] + padded
            chosen[i] = int(np.argmin(total))
            following[i] = total[chosen[i]]
        choices.append(chosen)
        error = following
    found = []
    i = number
    for chosen in reversed(choices):
        found.append(int(edges[i]))
        i = int(chosen[i])
    return found[::-1]
