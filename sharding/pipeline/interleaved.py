# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Interleaved: F and B share ticks, and each stage holds several chunks of layers.

With one chunk it is 1F1B, with more the interleaved order of Megatron-LM (arXiv 2104.04473,
section 2.2). A tick has a forward and a backward slot, so no stage waits for a slower kind of work:
idle over useful time is (stages - 1) / (chunks * micro_batches) for any ratio of F to B.

Deferred weight gradients fill idle ticks as zero-bubble schedules do (arXiv 2401.10241), in one
program without a branch on the stage: W of a chunk of layers is on all stages in the tick of B on
the first stage, so no tick with W idles. Idle over useful time falls to
(stages - 1) (F + B) / (chunks * micro_batches * (F + B + W)).

Micro-batches that leave out groups are in the order of `sharding/pipeline/first_come.py`.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from sharding.pipeline.first_come import first_come_schedule
from sharding.pipeline.order import PipelineOrder
from sharding.pipeline.schedule import Paths, Schedule
from sharding.pipeline.times import forward_times, from_times, position


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class InterleavedConfig(PipelineOrder):
    """F of one micro-batch and B of another in one tick."""

    name: ClassVar[str] = "interleaved"

    chunks: int = 1
    """Chunks of layers on each stage; n chunks divide idle time by n, and send activations n times
    as often. Above 1, training.accumulation must be a multiple of mesh.stage."""
    weight_gradients: Literal["at_once", "deferred"] = "at_once"
    """When gradients of weights are computed: in the backward pass, or deferred, which idles a
    quarter less and keeps inputs and gradients of products for mesh.stage micro-batches."""

    def __post_init__(self):
        if self.chunks < 1:
            raise ValueError(f"execution.pipeline.chunks={self.chunks} must be at least 1")

    @property
    def is_deferred(self) -> bool:
        """Whether gradients of weights are deferred."""
        return self.weight_gradients == "deferred"

    def check(self, stages: int, micro_batches: int) -> None:
        """Check that micro-batches fill whole turns through the chunks.

        Raises:
            ValueError: They do not.
        """
        if self.chunks == 1 or micro_batches % stages == 0:
            return
        above = -(-micro_batches // stages) * stages
        below = above - stages
        raise ValueError(
            f"training.accumulation={micro_batches} must be a multiple of"
            f" execution.mesh.stage={stages} with execution.pipeline.chunks={self.chunks}: set"
            f" training.accumulation to {f'{below} or ' if below else ''}{above}, or"
            " execution.pipeline.chunks to 1"
        )

    def check_paths(self) -> None:
        """Check that micro-batches may leave out groups.

        Raises:
            ValueError: Gradients of weights are deferred.
        """
        if self.is_deferred:
            raise ValueError(
                "weight_gradients=deferred is not available where micro-batches leave out groups,"
                " whose timetable has idle ticks elsewhere: set it to at_once"
            )

    def schedule(self, stages: int, micro_batches: int, paths: Paths | None = None) -> Schedule:
        """Return the table of one step.

        Raises:
            ValueError: See `check`, and with paths `check_paths`.
        """
        self.check(stages, micro_batches)
        if paths is not None:
            self.check_paths()
            return first_come_schedule(self.name, stages, self.chunks, paths)
        times = forward_times(stages, self.chunks, micro_batches)
        # The last group does B in the tick of its F, each group before it one tick later.
        first = stages * self.chunks - 1
        for _, stage, chunk, micro in list(times):
            place = position(stages, self.chunks, self.chunks - 1 - chunk, micro)
            times["B", stage, chunk, micro] = first + place + stages - 1 - stage
            if self.is_deferred:
                times["W", stage, chunk, micro] = first + place + stages - 1
        return from_times(self.name, stages, self.chunks, micro_batches, times)
