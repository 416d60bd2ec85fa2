# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Socket `Repacking`: the documents of a step packed again, for micro-batches of unequal work.

A loader reads the rows of a step as ever; a `Repacking` makes of them a batch of a fixed number of
micro-batches, of which the last may be left out (`Batch.level` is -1 there). The kind `assign`
builds one for a run with `data.packing` levels.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, ClassVar

from jaxmoe.data.batch import Batch
from jaxmoe.data.source import Row


class Repacking(abc.ABC):
    """Packs the rows of each step again."""

    @property
    @abc.abstractmethod
    def micro_batches(self) -> int:
        """Micro-batches of a batch, the unused ones included."""

    @abc.abstractmethod
    def batch(self, rows: Sequence[Row], *, process_index: int, process_count: int) -> Batch:
        """Return the part of one host of the batch of a step.

        Args:
            rows: All rows of the step.
            process_index: Part of the batch.
            process_count: Number of equal parts.
        """

    @abc.abstractmethod
    def describe(self, rows: Sequence[Row]) -> str:
        """Return what becomes of the rows of a step, in one line.

        Args:
            rows: All rows of the step.
        """


class Assigner(abc.ABC):
    """Base class of the kind `assign`: how the documents of a step are packed again."""

    __slots__ = ()

    name: ClassVar[str]
    """Name in configs and flags."""

    @abc.abstractmethod
    def repacking(self, plan: Any, chip: Any) -> Repacking:
        """Return the packing of the batches of a run.

        Args:
            plan: `jaxmoe.planning.abstract_step.StepPlan` of the run, with its mesh.
            chip: `jaxmoe.planning.hardware.Chip` of each device.

        Raises:
            ValueError: The step cannot leave out micro-batches.
        """

    @property
    @abc.abstractmethod
    def step_parts(self) -> tuple[Any, ...]:
        """Parts of a training step on these batches, such as measures of them."""
