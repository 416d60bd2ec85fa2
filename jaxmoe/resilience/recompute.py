# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""A step computed twice, to find a chip that computes wrongly what no other device computes.

Replicas that differ are found by comparing them (`ReplicaHook`). A shard that only one device has
is compared with itself: every so many steps the same compiled step runs twice on the same state and
batch, and fingerprints of all shards of the two results must be equal. Where they are not, it runs
a third time, to tell a chip that erred once from one that errs again:

    transient     two of the three results agree
    persistent    all three differ

Source: the rerun state machine of Megatron-LM. A device that errs alike every time is not found,
nor what is wrong in the loss and nowhere in the state. It needs a program that gives the same bits
each time: on GPUs XLA_FLAGS=--xla_gpu_deterministic_ops=true. At such a step the state exists twice
in the memory of the device, and the step takes twice as long.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxmoe.data.batch import Batch
from jaxmoe.fingerprints import (
    ReplicasDifferError,
    ShardFingerprint,
    shard_fingerprints,
)
from jaxmoe.state_tree import is_key
from jaxmoe.training.state import TrainState

Prints = dict[str, list[ShardFingerprint]]


class ComputationDiffersError(ReplicasDifferError):
    """The same step on the same state gave other bits the second time."""


class RecomputedStep:
    """A step that is computed twice every so many steps; every process must call it.

    Args:
        step_function: gives the same bits each time; it is given the state to donate.
        every: steps; 0: never.
        first_step: steps already done.
    """

    def __init__(
        self, step_function: Callable[[TrainState, Batch], Any], every: int, first_step: int
    ):
        self._step_function, self._every = step_function, every
        self._step = first_step

    def __call__(self, state: TrainState, batch: Batch) -> Any:
        """As `step_function`.

        Raises:
            ComputationDiffersError: with devices and arrays, and whether it happened again.
        """
        self._step += 1
        if self._every == 0 or self._step % self._every:
            return self._step_function(state, batch)
        kept = _copy(state)
        first = shard_fingerprints(self._step_function(state, batch)[0])
        # The first result is gone by now: of the state there are never more than two.
        result = self._step_function(_copy(kept), batch)
        second = shard_fingerprints(result[0])
        if first == second:
            return result
        del result
        third = shard_fingerprints(self._step_function(_copy(kept), batch)[0])
        raise ComputationDiffersError(verdict(first, second, third))


def verdict(first: Prints, second: Prints, third: Prints) -> str:
    """Three results of one step in words.

    Args:
        first: fingerprints by array and shard.
        second: likewise, not all the same.
        third: likewise.
    """
    if third == first or third == second:
        kind = "transient, two of three results agree"
        wrong, right = (second, first) if third == first else (first, second)
    else:
        kind, wrong, right = "persistent, no two of three results agree", second, first
    devices, arrays = set[int](), list[str]()
    for path, shards in wrong.items():
        odd = {
            shard.device
            for shard, other in zip(shards, right[path], strict=True)
            if shard.value != other.value
        }
        devices |= odd
        arrays += [path] * bool(odd)
    names = ", ".join(arrays[:5]) + (", ..." if len(arrays) > 5 else "")
    return (
        f"device {' and '.join(map(str, sorted(devices)))}: computed other bits from the same"
        f" state and batch ({kind}), in {len(arrays)} of {len(wrong)} arrays: {names}"
    )


def _copy(state: TrainState) -> TrainState:
    """Arrays of their own, where the state's lie."""

    def copy(leaf: Any) -> Any:
        if is_key(leaf):
            data = jnp.copy(jax.random.key_data(leaf))
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
        return jax.device_put(jnp.copy(leaf), leaf.sharding)

    return jax.tree.map(copy, state, is_leaf=is_key)
