# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""A fingerprint of 64 bits for every array of a state, the same on any mesh.

    f(x) = sum over all elements of bits(x_i) * w(i) mod 2^32, for two families of odd weights w

with i the index in the whole array. A sum knows no order, so that shards are summed where they lie
and their sums added, and an odd weight is a unit modulo 2^32: no change of a single element goes
unseen. What happened to several passes with a chance of 2^-64. This finds accidents of disks,
memories and chips; it is no signature, and a forger can make another array of the same fingerprint.

    fingerprints(tree)          {path: 16 hex digits}: what a manifest holds
    shard_fingerprints(tree)    of every device's own shard
    RunningFingerprint(shape)   of an array that is seen part by part

Devices that should hold the same are compared on the way: JAX computes on with replicas that a
defective chip or memory has made different, and would save any one of them.

Arrays of more than 2^32 elements share weights between elements 2^32 apart.
"""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, UInt32

from jaxmoe.errors import EndRunError
from jaxmoe.state_tree import flatten, is_key
from sharding.distributed import gather

_SEEDS = (0x243F6A88, 0x85A308D3)
_BLOCK = 1 << 22
"""Bytes of a part that are summed at once."""


class ShardFingerprint(NamedTuple):
    """Of what one device holds of one array."""

    device: int
    """Its id."""
    index: tuple[tuple[int, int], ...]
    """First and last index, the latter not included, in every dimension of the whole array."""
    value: int
    """64 bits."""


class ReplicasDifferError(EndRunError):
    """Devices that should hold the same bits do not."""

    status = "corrupted"


def fingerprints(tree: Any) -> dict[str, str]:
    """The fingerprint of every array of a state; every process must call this.

    Args:
        tree: named arrays, on any mesh.

    Raises:
        ReplicasDifferError: naming devices and arrays.
    """
    found, odd = {}, {}
    for path, shards in shard_fingerprints(tree).items():
        if devices := _odd_ones(shards):
            odd[path] = devices
        distinct = {shard.index: shard.value for shard in shards}
        low = sum(value & 0xFFFFFFFF for value in distinct.values()) & 0xFFFFFFFF
        high = sum(value >> 32 for value in distinct.values()) & 0xFFFFFFFF
        found[path] = f"{high:08x}{low:08x}"
    if odd:
        devices = sorted({device for some in odd.values() for device in some})
        names = ", ".join([*odd][:5]) + (", ..." if len(odd) > 5 else "")
        raise ReplicasDifferError(
            f"device {' and '.join(map(str, devices))}: holds other bits than its replicas, in"
            f" {len(odd)} of {len(found)} arrays: {names}"
        )
    return found


class RunningFingerprint:
    """The fingerprint of an array that is never whole in memory.

    Args:
        shape: of the whole array.
    """

    def __init__(self, shape: Sequence[int]):
        self._shape = tuple(shape)
        self._sums = np.zeros(2, np.uint32)

    def add(self, part: Any, first: int = 0) -> None:
        """Takes in a part: of the whole rank, and all but the first dimension whole.

        Args:
            part: the values.
            first: where it begins in the first dimension.
        """
        # In blocks: the sums of all of it would need several times its memory.
        axis = next((axis for axis, size in enumerate(part.shape) if size > 1), 0)
        rows = max(1, _BLOCK * part.shape[axis] // max(part.nbytes, 1))
        for begin in range(0, part.shape[axis], rows):
            block = part[(slice(None),) * axis + (slice(begin, begin + rows),)]
            starts = np.zeros(part.ndim, np.uint32)
            starts[0] = first
            starts[axis] += begin
            sums = _of_part(jnp.asarray(block), jnp.asarray(starts), self._shape)
            self._sums += np.asarray(sums, np.uint32)

    @property
    def value(self) -> str:
        """16 hex digits, as `fingerprints` gives them."""
        high, low = self._sums.tolist()
        return f"{high:08x}{low:08x}"


def _odd_ones(shards: Sequence[ShardFingerprint]) -> list[int]:
    """Devices that hold something else than most of those that hold the same shard; of two that
    differ both, because either may be wrong."""
    by_index: dict[Any, list[ShardFingerprint]] = {}
    for shard in shards:
        by_index.setdefault(shard.index, []).append(shard)
    odd = []
    for replicas in by_index.values():
        counts = collections.Counter(shard.value for shard in replicas).most_common()
        if len(counts) > 1:
            is_clear = counts[0][1] > counts[1][1]
            odd += [s.device for s in replicas if not is_clear or s.value != counts[0][0]]
    return odd


def shard_fingerprints(tree: Any) -> dict[str, list[ShardFingerprint]]:
    """Of every array the fingerprints of all shards; every process must call this.

    Args:
        tree: as of `fingerprints`.
    """
    leaves = {path: _plain(leaf) for path, leaf in sorted(flatten(tree).items())}
    groups: dict[Any, list[str]] = {}
    for path, leaf in leaves.items():
        groups.setdefault(_mesh_of(leaf), []).append(path)
    found: dict[str, list[ShardFingerprint]] = {}
    for mesh, paths in groups.items():
        arrays = [leaves[path] for path in paths]
        sums = _on_one_device(arrays) if mesh is None else _on_a_mesh(arrays, mesh)
        for place, path in enumerate(paths):
            found[path] = _named(leaves[path], mesh, sums[:, place])
    return found


def _mesh_of(leaf: Array) -> Any:
    return leaf.sharding.mesh if isinstance(leaf.sharding, NamedSharding) else None


def _plain(leaf: Any) -> Array:
    leaf = jax.random.key_data(leaf) if is_key(leaf) else leaf
    return leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)


def _named(
    array: Array, mesh: Mesh | None, sums: UInt32[np.ndarray, "devices 2"]
) -> list[ShardFingerprint]:
    where = array.sharding.devices_indices_map(array.shape)
    devices = list(where) if mesh is None else list(mesh.devices.flat)
    shards = []
    for device, (high, low) in zip(devices, sums.tolist(), strict=True):
        index = tuple(
            slice(*part.indices(size))
            for part, size in zip(where[device], array.shape, strict=True)
        )
        pairs = tuple((part.start, part.stop) for part in index)
        shards.append(ShardFingerprint(device.id, pairs, (high << 32) | low))
    return shards


def _on_one_device(arrays: Sequence[Array]) -> UInt32[np.ndarray, "1 leaves 2"]:
    for array in arrays:
        if len(array.sharding.device_set) > 1:
            raise ValueError(
                f"an array of shape {array.shape} lies on several devices by {array.sharding}: only"
                " meshes are known here, place it with jax.device_put and a NamedSharding"
            )
    return np.asarray([np.asarray(_whole(array)) for array in arrays], np.uint32)[None]


@jax.jit
def _whole(array: Array) -> UInt32[Array, " 2"]:
    return _sums(array, [0] * array.ndim, array.shape)


@functools.partial(jax.jit, static_argnames="shape")
def _of_part(part: Array, starts: Array, shape: tuple[int, ...]) -> UInt32[Array, " 2"]:
    return _sums(part, list(starts), shape)


def _on_a_mesh(arrays: Sequence[Array], mesh: Mesh) -> UInt32[np.ndarray, "devices leaves 2"]:
    specs = tuple(cast(NamedSharding, array.sharding).spec for array in arrays)
    summed = _program(mesh, specs, tuple(array.shape for array in arrays))(*arrays)
    own = {shard.device: np.asarray(shard.data)[0] for shard in summed.addressable_shards}
    devices = list(mesh.devices.flat)
    if len(own) == len(devices):
        return np.stack([own[device] for device in devices])
    # The devices of several processes: each gives its own, and 0 for the others.
    zeros = np.zeros((len(arrays), 2), np.uint32)
    mine = np.stack([own.get(device, zeros) for device in devices])
    return gather(mine).sum(0, dtype=np.uint32)


@functools.lru_cache(maxsize=8)
def _program(mesh: Mesh, specs: tuple[PartitionSpec, ...], shapes: tuple[tuple[int, ...], ...]):
    """Of every device's shards: one compiled program for the whole state."""
    sizes = dict(mesh.shape)

    def local(*shards: Array) -> UInt32[Array, "1 leaves 2"]:
        sums = []
        for shard, spec, shape in zip(shards, specs, shapes, strict=True):
            names = [*spec, *[None] * (len(shape) - len(spec))]
            starts = [
                _place(name, sizes) * size for name, size in zip(names, shard.shape, strict=True)
            ]
            sums.append(_sums(shard, starts, shape))
        return jnp.stack(sums)[None]

    each = PartitionSpec(mesh.axis_names)
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=each, check_vma=False))


def _place(names: Any, sizes: dict[str, int]) -> Any:
    """Which piece of a dimension this device has; of several mesh axes the first is outermost."""
    names = () if names is None else (names,) if isinstance(names, str) else names
    place: Any = 0
    for name in names:
        place = place * sizes[name] + jax.lax.axis_index(name)
    return place


def _sums(shard: Array, starts: Sequence[Any], shape: Sequence[int]) -> UInt32[Array, " 2"]:
    """Both sums of one shard of an array of this shape, which begins at `starts`."""
    if shard.size == 0:  # of nothing; XLA of jax 0.11 crashes on such a reduction
        return jnp.zeros(2, jnp.uint32)
    if jax.typeof(shard).memory_space == jax.memory.Space.Host:  # offloaded: one after the other
        shard = jax.device_put(shard, jax.memory.Space.Device)
    index = jnp.zeros(shard.shape, jnp.uint32)
    for dimension, start in enumerate(starts):
        stride = jnp.uint32(math.prod(shape[dimension + 1 :]) % 2**32)
        own = jax.lax.broadcasted_iota(jnp.uint32, shard.shape, dimension)
        index += (own + jnp.asarray(start).astype(jnp.uint32)) * stride
    bits = _bits(shard)
    terms = tuple(bits * (_mix(index + jnp.uint32(s)) | 1) for s in _SEEDS)
    # Both sums in one pass: XLA vectorises this one, where two sums take 40 times as long on a CPU.
    zeros, every = (jnp.uint32(0),) * len(terms), tuple(range(shard.ndim))
    return jnp.stack(
        jax.lax.reduce(terms, zeros, lambda left, right: tuple(map(jnp.add, left, right)), every)
    )


def _bits(x: Array) -> UInt32[Array, ...]:
    """Each element as a whole number of up to 32 bits."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    if x.dtype in (jnp.int4, jnp.uint4):  # no 4-bit type to look at them through
        return x.astype(jnp.uint32)
    kinds = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}
    return jax.lax.bitcast_convert_type(x, kinds[x.dtype.itemsize]).astype(jnp.uint32)


def _mix(x: UInt32[Array, ...]) -> UInt32[Array, ...]:
    """Scatters indices over 32 bits, each to another place (the finaliser of MurmurHash3)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
