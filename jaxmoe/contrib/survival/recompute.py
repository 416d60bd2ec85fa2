# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Computes steps twice to find a device that computes wrong numbers.

Replicas that differ are found by comparing them (`ReplicaHook`). A shard that only one device holds
is compared with itself: every few steps the same compiled step runs twice on the same state and
batch, and the fingerprints of all shards must be equal. If they are not, it runs a third time:

    transient     two of the three results agree
    persistent    all three differ

Source: the rerun state machine of Megatron-LM. A device that errs in the same way every time is not
found. The program must be deterministic: on GPUs set XLA_FLAGS=--xla_gpu_deterministic_ops=true. A
step that is recomputed needs device memory for two states and takes twice as long.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxmoe.checkpoint.capture import copy_state
from jaxmoe.data.batch import Batch
from jaxmoe.fingerprints import (
    ReplicasDifferError,
    ShardFingerprint,
    shard_fingerprints,
)
from jaxmoe.training.state import TrainState

Prints = dict[str, list[ShardFingerprint]]


class ComputationDiffersError(ReplicasDifferError):
    """The same step on the same state gave other bits the second time."""


class RecomputedStep:
    """Step function that is computed twice every few steps; every process must call it.

    Args:
        step_function: Deterministic step, which donates its state.
        every: Steps between comparisons; 0 disables them.
        first_step: Steps already done.
    """

    def __init__(
        self, step_function: Callable[[TrainState, Batch], Any], every: int, first_step: int
    ):
        self._step_function = step_function
        self._every = every
        self._step = first_step

    def __call__(self, state: TrainState, batch: Batch) -> Any:
        """Return the result of `step_function`.

        Raises:
            ComputationDiffersError: Names devices, arrays, and whether the error repeated.
        """
        self._step += 1
        if self._every == 0 or self._step % self._every:
            return self._step_function(state, batch)
        copied = copy_state(state)
        first = shard_fingerprints(self._step_function(state, batch)[0])
        # The first result is freed by now: at most two states exist.
        result = self._step_function(copy_state(copied), batch)
        second = shard_fingerprints(result[0])
        if first == second:
            return result
        del result
        third = shard_fingerprints(self._step_function(copy_state(copied), batch)[0])
        raise ComputationDiffersError(verdict(first, second, third))


def verdict(first: Prints, second: Prints, third: Prints) -> str:
    """Return a description of three results of one step.

    Args:
        first: Fingerprints by array and shard.
        second: Fingerprints of the second run, not all equal to the first.
        third: Fingerprints of the third run.
    """
    if third == first or third == second:
        kind = "transient, two of three results agree"
        wrong, right = (second, first) if third == first else (first, second)
    else:
        kind = "persistent, no two of three results agree"
        wrong = second
        right = first
    devices = set[int]()
    arrays = list[str]()
    for path, shards in wrong.items():
        odd = {
            shard.device
            for shard, other_shard in zip(shards, right[path], strict=True)
            if shard.value != other_shard.value
        }
        devices |= odd
        arrays += [path] * bool(odd)
    names = ", ".join(arrays[:5]) + (", ..." if len(arrays) > 5 else "")
    return (
        f"device {' and '.join(map(str, sorted(devices)))}: computed other bits from the same"
        f" state and batch ({kind}), in {len(arrays)} of {len(wrong)} arrays: {names}"
    )
