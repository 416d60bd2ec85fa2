# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Arrays of a step from its works: one pass over the works for each array, in host memory.

Every array is new, because a device may still read those of the step before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxmoe.models.sampling import Limits
from jaxmoe.serve.blocks import num_pages
from jaxmoe.serve.device.config import ExecutorConfig
from jaxmoe.serve.device.step import StepInputs
from jaxmoe.serve.sequence import PENDING
from jaxmoe.serve.step import EngineStep, Work
from sharding.sequence_parallel import PageTables


class PlacedWork(NamedTuple):
    """Work of a step, and its place in the arrays."""

    work: Work
    row: int
    """Row of the tables and of the results."""
    first: int
    """Place of its first token."""


class InputArrays:
    """Makes the arrays of steps, and remembers the tables of pages of the last one."""

    def __init__(self, config: ExecutorConfig, vocab_size: int, adapters: Sequence[str]):
        """Begin without tables.

        Args:
            config: Sizes of the executor.
            vocab_size: Tokens of the model.
            adapters: Names of the adapters, in the order of their numbers.
        """
        self._config = config
        self._vocab_size = vocab_size
        self._numbers = {name: number for number, name in enumerate(adapters)}
        self._tables: dict[int, tuple[tuple[int, ...], np.ndarray]] = {}

    def of(
        self,
        step: EngineStep,
        pieces: tuple[int, int],
        context_length: int,
        *,
        drawn: Any,
        rows: Mapping[int, int],
    ) -> tuple[StepInputs, list[PlacedWork]]:
        """Return the arrays of a step, and where its works lie in them.

        Args:
            step: Step with its pages taken.
            pieces: Number and length of the compiled pieces beside the single tokens.
            context_length: Tokens of a sequence that attention reads.
            drawn: Tokens that the step before has drawn, on the device.
            rows: Row in them of each sequence that has drawn one.
        """
        singles = self._config.shapes.singles
        num_pieces, length = pieces
        num_rows = singles + num_pieces
        num_tokens = singles + num_pieces * length
        num_singles = len(step.singles)
        works = [*step.singles, *step.pieces]
        placed = [PlacedWork(work, row, row) for row, work in enumerate(step.singles)]
        placed += [
            PlacedWork(work, singles + number, singles + number * length)
            for number, work in enumerate(step.pieces)
        ]
        tokens = np.zeros(num_tokens, np.int32)
        sources = np.full(num_tokens, -1, np.int32)
        positions = np.full(num_tokens, -1, np.int32)
        tokens[:num_singles] = [work.tokens[0] for work in step.singles]
        positions[:num_singles] = [work.start for work in step.singles]
        for work, _, first in placed[num_singles:]:
            end = first + len(work.tokens)
            tokens[first:end] = work.tokens
            positions[first:end] = np.arange(work.start, work.start + len(work.tokens))
        for place in np.flatnonzero(tokens == PENDING).tolist():
            # A token that is pending is the last one of its work.
            row = place if place < singles else singles + (place - singles) // length
            work = works[row if row < singles else num_singles + row - singles]
            tokens[place] = 0
            sources[place] = rows[work.id]
        tables, slots = self._tables_of(placed, num_rows, context_length, positions)
        last = np.zeros(num_rows, np.int32)
        place_rows = [row for _, row, _ in placed]
        last[place_rows] = [first + len(work.tokens) - 1 for work, _, first in placed]
        inputs = StepInputs(
            tokens=tokens,
            positions=positions,
            tables=PageTables(slots, tables[:singles], tables[singles:]),
            last=last,
            seeds=_column(num_rows, place_rows, [work.sampling.seed for work in works]),
            indices=_column(num_rows, place_rows, [work.index for work in works]),
            limits=self._limits(num_rows, place_rows, works),
            wants_top=np.bool_(
                any(work.sampling.num_logprobs > 0 and work.draws for work in works)
            ),
            drawn=drawn,
            sources=sources,
            adapters=self._adapters_of(placed, num_tokens),
        )
        return inputs, placed

    def _tables_of(
        self,
        placed: Sequence[PlacedWork],
        num_rows: int,
        context_length: int,
        positions: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the table of pages of each row, and the slot of each token in the pool.

        A table is made from its pages when these have changed, every `page_size` tokens.
        """
        size = self._config.page_size
        width = num_pages(context_length, size)
        tables = np.zeros((num_rows, width), np.int32)
        slots = np.full(len(positions), self._config.num_pages * size, np.int32)
        before, self._tables = self._tables, {}
        for work, row, first in placed:
            entry = before.get(work.id)
            if entry is None or entry[0] != work.pages:
                entry = work.pages, np.array(work.pages, np.int32)
            self._tables[work.id] = entry
            pages = entry[1]
            tables[row, : min(len(pages), width)] = pages[:width]
            count = len(work.tokens)
            if count == 1:
                page, place = divmod(work.start, size)
                slots[first] = work.pages[page] * size + place
            else:
                where = positions[first : first + count]
                slots[first : first + count] = pages[where // size] * size + where % size
        return tables, slots

    def _limits(self, num_rows: int, rows: Sequence[int], works: Sequence[Work]) -> Limits:
        """Return how each row is sampled; greedily without filters where there is no work."""
        samplings = [work.sampling for work in works]
        size = self._vocab_size
        top_k = np.full(num_rows, size, np.int32)
        top_p = np.ones(num_rows, np.float32)
        top_k[rows] = [min(sampling.top_k or size, size) for sampling in samplings]
        top_p[rows] = [sampling.top_p for sampling in samplings]
        return Limits(
            temperature=_column(num_rows, rows, [s.temperature for s in samplings], np.float32),
            top_k=top_k,
            top_p=top_p,
            min_p=_column(num_rows, rows, [s.min_p for s in samplings], np.float32),
        )

    def _adapters_of(self, placed: Sequence[PlacedWork], num_tokens: int) -> np.ndarray | None:
        """Return the number of the adapter of each token; None where there are no adapters."""
        if not self._numbers:
            return None
        adapters = np.full(num_tokens, -1, np.int32)
        for work, _, first in placed:
            adapters[first : first + len(work.tokens)] = self._numbers.get(work.adapter, -1)
        return adapters


def _column(
    num_rows: int, rows: Sequence[int], values: Sequence[Any], dtype: Any = np.int32
) -> np.ndarray:
    """Return the values of some rows, 0 in the others."""
    column = np.zeros(num_rows, dtype)
    column[rows] = values
    return column
