# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Copies a state on its devices, so that it is saved while training goes on.

A train step donates its state: an array that a save still reads would be overwritten, or would keep
the next step waiting for the transfer to the host. A copy on the devices takes one pass over their
memory. The next step waits for that pass only, because XLA orders a donation after the reads
before it. The copy takes the memory of a second state until its transfer to the host has ended.

    reason_against(state)    why a second state must not be put on the devices
    is_on_host(state)        whether a writer reads the state where it is, and keeps it until then
    copy_state(state)        the copy, which need not be ready

Source: lazy copies of DataStates-LLM (arXiv 2406.10707, section 4), which let the copy overlap with
the forward and backward pass, where parameters do not change. One JAX program computes both and the
update, hence the copy.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxmoe.host_memory import memory_left
from jaxmoe.state_tree import ExternalArray


def reason_against(state: Any) -> str:
    """Return why this process cannot hold a second copy of a state; empty if it can.

    Args:
        state: Tree of arrays.
    """
    leaves = jax.tree.leaves(state)
    for leaf in leaves:
        if isinstance(leaf, ExternalArray):
            return f"arrays are in {leaf.place}"
    arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
    needed: dict[jax.Device, int] = {}
    for array in arrays:
        device = min(array.sharding.addressable_devices, key=lambda device: device.id)
        kind = array.sharding.memory_kind
        if kind is not None and kind != device.default_memory().kind:
            return f"arrays are in {kind} memory"
        size = math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
        needed[device] = needed.get(device, 0) + size
    if reason := _reason_of_the_host(arrays):
        return reason
    for device, size in needed.items():
        stats = _stats(device)
        limit = stats.get("bytes_limit")
        peak = stats.get("peak_bytes_in_use")
        if limit is not None and peak is not None and size > limit - peak:
            return _in_words(limit - peak, "device", size)
    return ""


def is_on_host(state: Any) -> bool:
    """Return whether arrays are on CPU devices, whose memory is that of the host.

    A writer reads such an array without a copy: until it has written it, a step that donates the
    array gets new memory.

    Args:
        state: Tree of arrays.
    """
    arrays = (leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array))
    return any(device.platform == "cpu" for x in arrays for device in x.sharding.device_set)


def _reason_of_the_host(arrays: list[jax.Array]) -> str:
    """Return why this host cannot hold a second copy of the arrays of its CPU devices."""
    needed = sum(
        math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
        for array in arrays
        for device in array.sharding.addressable_devices
        if device.platform == "cpu"
    )
    left = memory_left() if needed else None
    return "" if left is None or needed <= left else _in_words(left, "host", needed)


def _in_words(left: int, owner: str, needed: int) -> str:
    free = f"{left / 1e6:.1f} MB of {owner} memory are free at the peak of a step"
    return f"{free}, and a copy of the state needs {needed / 1e6:.1f} MB"


def _stats(device: jax.Device) -> dict[str, int]:
    """Return the use of a device's memory, in bytes; empty where it is not measured."""
    return device.memory_stats() or {}


def copy_state(state: Any) -> Any:
    """Return a copy of all arrays in new memory of the same devices, without waiting for it.

    Args:
        state: Tree of arrays; numpy arrays are copied on the host.
    """
    leaves, tree = jax.tree.flatten(state)
    groups: dict[Any, list[int]] = {}
    copies: list[Any] = []
    for place, leaf in enumerate(leaves):
        copies.append(leaf if isinstance(leaf, jax.Array) else np.array(leaf))
        if isinstance(leaf, jax.Array):
            groups.setdefault(_group(leaf.sharding), []).append(place)
    for places in groups.values():
        arrays = [leaves[place] for place in places]
        program = _copier(tuple(array.sharding for array in arrays))
        for place, copied in zip(places, program(arrays), strict=True):
            copies[place] = copied
    return jax.tree.unflatten(tree, copies)


def _group(placed: jax.sharding.Sharding) -> Any:
    """Return what the arrays of one program have in common."""
    return placed.mesh if isinstance(placed, NamedSharding) else frozenset(placed.device_set)


@functools.lru_cache(maxsize=8)
def _copier(placed: tuple[jax.sharding.Sharding, ...]) -> Any:
    # Without donation, XLA gives every output its own memory.
    return jax.jit(lambda arrays: [jnp.copy(array) for array in arrays], out_shardings=[*placed])
