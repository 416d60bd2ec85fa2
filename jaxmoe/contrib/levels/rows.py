# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Turns the rows of a step into a batch whose micro-batches have one level each.

Rows stay as they are, shared by all devices, where the plan of the assigner would take longer.
The documents are those of the rows that a loader reads, whole and in no other step. A document of
n tokens takes n - 1 places: its last token is a target only. Micro-batch i of M has rows i, i + M,
... of the batch, as `jaxmoe.training.accumulation` cuts it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jaxmoe.contrib.levels.cost import LevelCost
from jaxmoe.contrib.levels.plan import Group, LevelAssigner, LevelPlan, Room
from jaxmoe.data.batch import Batch
from jaxmoe.data.repacking import Repacking
from jaxmoe.data.source import Row
from pallas_kernels.array_types import Float, Int


@dataclasses.dataclass(frozen=True)
class Document:
    """A document, or the piece of one that a row holds."""

    tokens: Int[np.ndarray, " n"]
    weights: Float[np.ndarray, " n-1"]
    """Loss weight of each token but the first."""

    @property
    def length(self) -> int:
        """Number of predictions."""
        return len(self.tokens) - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forecast:
    """A step, or the mean of some, by the cost model."""

    shares: dict[int, float]
    """Share of the tokens by the devices that share their documents."""
    micro_batches: float
    seconds: float
    static_micro_batches: float
    static: float
    """Seconds if all devices share every row, packed by best fit."""

    @property
    def text(self) -> str:
        """Shares, and the speed relative to rows that all devices share."""
        shares = ", ".join(f"{degree}: {share:.0%}" for degree, share in self.shares.items())
        return f"{shares} of tokens; {self.static / self.seconds:.2g}x of static"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LevelPacking(Repacking):
    """Packing of the rows of a step by level."""

    assigner: LevelAssigner
    room: Room
    cost: LevelCost
    accumulation: int
    """Micro-batches of full rows."""

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a batch, M, of which the last may be empty."""
        return self.room.buffer(self.accumulation)

    @property
    def batch_size(self) -> int:
        """Rows of a batch."""
        return self.micro_batches * self.room.rows

    def plan(self, rows: Sequence[Row]) -> tuple[list[Document], LevelPlan]:
        """Return the documents of a step and its micro-batches."""
        by_row = [documents_of(row) for row in rows]
        plan = self._fastest([[document.length for document in row] for row in by_row])
        return [document for row in by_row for document in row], plan

    def _fastest(self, lengths: Sequence[Sequence[int]]) -> LevelPlan:
        """Return the plan of the assigner, or that of the rows as they are if it is faster.

        Args:
            lengths: Tokens of the documents of each row.
        """
        flat = [length for row in lengths for length in row]
        by_level = self.assigner.assign(flat, self.room, self.cost)
        static = self._static(lengths)
        plans = (by_level, static)
        return min(plans, key=lambda plan: plan.seconds(flat, self.room, self.cost))

    def _static(self, lengths: Sequence[Sequence[int]]) -> LevelPlan:
        """Return the plan in which all devices share every row.

        Args:
            lengths: Tokens of the documents of each row.
        """
        top = len(self.room.degrees) - 1
        number = -(-len(lengths) // self.room.rows)
        starts = np.cumsum([0, *map(len, lengths)]).tolist()
        groups: list[Group] = []
        for first in range(number):
            members = list(range(first, len(lengths), number))
            members.sort(key=lambda row: -self.cost.attention(lengths[row], top))
            groups += [tuple(range(starts[row], starts[row + 1])) for row in members]
            groups += [()] * (self.room.rows - len(members))
        return LevelPlan({top: tuple(groups)})

    def forecast(self, lengths: Sequence[Sequence[int]]) -> Forecast:
        """Return the shares of the levels and the seconds of a step, by level and without levels.

        Args:
            lengths: Tokens of the documents of each row.
        """
        flat = [length for row in lengths for length in row]
        plan = self._fastest(lengths)
        static = self._static(lengths)
        return Forecast(
            shares=dict(zip(self.room.degrees, plan.shares(flat, self.room), strict=True)),
            micro_batches=len(plan.micro_batches(self.room)),
            seconds=plan.seconds(flat, self.room, self.cost),
            static_micro_batches=len(static.micro_batches(self.room)),
            static=static.seconds(flat, self.room, self.cost),
        )

    def forecast_of(self, rows: Iterable[Row]) -> Forecast:
        """Return the forecast of a step.

        Args:
            rows: All rows of the step.
        """
        return self.forecast([[document.length for document in documents_of(row)] for row in rows])

    def describe(self, rows: Sequence[Row]) -> str:
        """Return the forecast of a step in words."""
        return self.forecast_of(rows).text

    def batch(self, rows: Sequence[Row], *, process_index: int, process_count: int) -> Batch:
        """Return the part of one host of the batch of a step."""
        documents, plan = self.plan(rows)
        shape = (self.batch_size, self.room.length)
        names = ("tokens", "targets", "segment_ids", "positions")
        arrays: dict[str, Any] = {name: np.zeros(shape, np.int32) for name in names}
        weights = np.zeros(shape, np.float32)
        levels = np.full(shape[0], -1, np.int32)
        for number, (level, groups) in enumerate(plan.micro_batches(self.room)):
            levels[number :: self.micro_batches] = level
            segments = np.zeros(self.room.rows, int)
            for place, group in enumerate(groups):
                row, part = divmod(place, self.room.ranks // self.room.degrees[level])
                start = part * self.room.capacity(level)
                at = row * self.micro_batches + number
                for document in (documents[i] for i in group):
                    end = start + document.length
                    segments[row] += 1
                    arrays["tokens"][at, start:end] = document.tokens[:-1]
                    arrays["targets"][at, start:end] = document.tokens[1:]
                    arrays["segment_ids"][at, start:end] = segments[row]
                    arrays["positions"][at, start:end] = np.arange(document.length)
                    weights[at, start:end] = document.weights
                    start = end
        part = self.batch_size // process_count
        process_rows = slice(process_index * part, (process_index + 1) * part)
        arrays |= {"loss_weights": weights, "level": levels}
        return Batch.from_arrays({name: array[process_rows] for name, array in arrays.items()})


def documents_of(row: Row) -> list[Document]:
    """Return the documents of a row that have a prediction.

    Args:
        row: S + 1 tokens.
    """
    ids = np.ones(len(row.tokens), np.int32) if row.segment_ids is None else row.segment_ids
    weights = np.ones(len(ids), np.float32) if row.loss_weights is None else row.loss_weights
    borders = np.flatnonzero(np.diff(ids, prepend=-1, append=-1))
    return [
        Document(row.tokens[start:end], weights[start + 1 : end].astype(np.float32))
        for start, end in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True)
        if ids[start] != 0 and end - start > 1
    ]
