# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""GPipe: all forward passes of a step, then all backward passes (arXiv 1811.06965, section 2.3).

It idles as long as 1F1B and keeps the inputs of every micro-batch: use it as a reference, or where
memory does not matter.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from sharding.pipeline.order import PipelineOrder
from sharding.pipeline.schedule import Paths, Schedule
from sharding.pipeline.times import forward_times, from_times


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GPipeConfig(PipelineOrder):
    """All F, then all B."""

    name: ClassVar[str] = "gpipe"

    @property
    def chunks(self) -> int:
        """One."""
        return 1

    @property
    def is_deferred(self) -> bool:
        """False."""
        return False

    def check(self, stages: int, micro_batches: int) -> None:
        """Accept any number of stages and micro-batches."""
        del stages, micro_batches

    def check_paths(self) -> None:
        """Refuse micro-batches that leave out groups, always."""
        raise ValueError(
            "gpipe has no timetable for micro-batches that leave out groups: take interleaved"
        )

    def schedule(self, stages: int, micro_batches: int, paths: Paths | None = None) -> Schedule:
        """Return the table of one step without paths; see the base class."""
        if paths is not None:
            self.check_paths()
        times = forward_times(stages, self.chunks, micro_batches)
        length = micro_batches + stages - 1
        for stage in range(stages):
            for micro in range(micro_batches):
                times["B", stage, 0, micro] = length + micro + stages - 1 - stage
        return from_times(self.name, stages, self.chunks, micro_batches, times)
