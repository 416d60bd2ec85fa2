# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Builds schedules from the ticks of their works, and the ticks of forward passes."""

from __future__ import annotations

from collections.abc import Mapping

from sharding.pipeline.schedule import KINDS, Kind, Paths, Schedule, StageWork


def from_times(
    name: str,
    stages: int,
    chunks: int,
    micro_batches: int,
    times: Mapping[tuple[Kind, int, int, int], int],
    paths: Paths | None = None,
) -> Schedule:
    """Return the schedule with works at given times, checked.

    Args:
        name: Name for messages.
        stages: Stages of the pipeline.
        chunks: Chunks of layers on each stage.
        micro_batches: Micro-batches of a step.
        times: {(kind, stage, chunk, micro-batch): tick}.
        paths: Groups that each micro-batch passes through; None for all.

    Raises:
        ValueError: See `Schedule.check`.
    """
    rows: list[list[list[StageWork]]] = [
        [[] for _ in range(stages)] for _ in range(max(times.values(), default=-1) + 1)
    ]
    for (kind, stage, chunk, micro), tick in times.items():
        rows[tick][stage].append(StageWork(kind, chunk, micro))
    ticks = tuple(
        tuple(tuple(sorted(works, key=lambda work: KINDS.index(work.kind))) for works in row)
        for row in rows
    )
    schedule = Schedule(name, stages, chunks, micro_batches, ticks, paths)
    schedule.check()
    return schedule


def position(stages: int, chunks: int, chunk: int, micro: int) -> int:
    """Return the place of a micro-batch's pass through a chunk in the order of a stage.

    As many micro-batches as there are stages pass through each chunk in turn (Megatron-LM,
    arXiv 2104.04473, section 2.2).

    Args:
        stages: Stages of the pipeline.
        chunks: Chunks of layers on each stage.
        chunk: Number of the chunk.
        micro: Number of the micro-batch.
    """
    block, place = divmod(micro, stages)
    return (block * chunks + chunk) * stages + place


def forward_times(
    stages: int, chunks: int, micro_batches: int
) -> dict[tuple[Kind, int, int, int], int]:
    """Return the earliest ticks of F in the order of `position`, for `from_times`.

    Args:
        stages: Stages of the pipeline.
        chunks: Chunks of layers on each stage.
        micro_batches: Micro-batches of a step.
    """
    return {
        ("F", stage, chunk, micro): position(stages, chunks, chunk, micro) + stage
        for stage in range(stages)
        for chunk in range(chunks)
        for micro in range(micro_batches)
    }


def forward_schedule(stages: int, chunks: int, micro_batches: int) -> Schedule:
    """Return a table of forward passes alone, for evaluation.

    Args:
        stages: Stages of the pipeline.
        chunks: Chunks of layers on each stage.
        micro_batches: Micro-batches; any number, but only multiples of stages leave no gaps where
            chunks is above 1.
    """
    times = forward_times(stages, chunks, micro_batches)
    return from_times("forward", stages, chunks, micro_batches, times)
