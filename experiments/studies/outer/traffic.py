# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Counts the bytes that a worker sends in a mean step, from the method alone."""

from __future__ import annotations

import math

from experiments.studies.outer.config import ALONE
from jaxmoe.run.assemble import Assembly
from jaxmoe.training.workers import WorkerTraining

_FLOAT_BYTES = 4


def bytes_per_step(assembly: Assembly, name: str, workers: int) -> float:
    """Return the bytes that a worker sends in a step, as a mean over the steps.

    Args:
        assembly: Run of the method.
        name: Row of the table.
        workers: Number of workers.
    """
    if name == ALONE:
        return 0.0
    training = assembly.worker_training
    if training is None:
        numbers = sum(math.prod(row.shape) for row in assembly.plan.table.trained_rows)
        return _all_reduce(workers) * numbers * _FLOAT_BYTES
    return _sent(training)


def _all_reduce(workers: int) -> float:
    """Return the copies of an array that a worker sends in an all-reduce."""
    return 2 * (workers - 1) / workers


def _sent(training: WorkerTraining) -> float:
    """Return the bytes of a method that exchanges parameters.

    Plain arrays are summed by an all-reduce, others travel around a ring to every worker.
    """
    method, workers, total = training.method, training.workers.number, 0.0
    for fragment in training.fragments:
        for path in (*fragment.strided, *fragment.whole):
            codec = method.codec(training.leaves[path])
            copies = _all_reduce(workers) if codec.is_plain else workers - 1
            total += copies * codec.bits(fragment.shape(training.leaves[path])) / 8
    return total / method.timing.every
