# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Computes a 64-bit fingerprint of every array of a state, the same on any mesh.

    f(x) = sum over all elements of bits(x_i) * w(i) mod 2^32, for two families of odd weights w

with i the index in the whole array. Sums are independent of order: each device sums its shards. An
odd weight is a unit modulo 2^32, so every change of a single element changes the sum; changes of
several elements are missed with probability 2^-64. A fingerprint finds accidental damage by disks,
memories and chips, not forgery.

    fingerprints(tree)          {path: 16 hex digits}, for a manifest
    begin_fingerprints(tree)    a function that returns them, for another thread
    shard_fingerprints(tree)    fingerprint of each device's shard
    RunningFingerprint(shape)   fingerprint of an array that is read in parts

Replicas on several devices are compared: JAX continues with replicas that a defective chip or
memory has made different, and would save any of them.

In arrays of more than 2^32 elements, elements 2^32 apart share weights.
"""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, UInt32

from jaxmoe.errors import EndRunError
from jaxmoe.state_tree import flatten, is_key

_SEEDS = (0x243F6A88, 0x85A308D3)
_BLOCK = 1 << 22
"""Bytes of a part that are summed in one call."""


class ShardFingerprint(NamedTuple):
    """Fingerprint of one device's shard of one array."""

    device: int
    """Id of the device."""
    index: tuple[tuple[int, int], ...]
    """Start and end (exclusive) in every dimension of the whole array."""
    value: int
    """Fingerprint, 64 bits."""


class ReplicasDifferError(EndRunError):
    """Devices that should hold the same bits do not."""

    status = "corrupted"


def fingerprints(tree: Any) -> dict[str, str]:
    """Return the fingerprint of every array of a state; every process must call this.

    Args:
        tree: Tree of named arrays on any mesh.

    Raises:
        ReplicasDifferError: Replicas differ; the message names devices and arrays.
    """
    return begin_fingerprints(tree)()


def begin_fingerprints(tree: Any) -> Callable[[], dict[str, str]]:
    """Start to compute what `fingerprints` returns, without waiting for it.

    Every process must call this at the same place among its computations on all devices. The
    function that it returns computes nothing on devices, so that any thread may call it.

    Args:
        tree: Tree of named arrays on any mesh.
    """
    groups = _begin(tree)
    return lambda: _join(_read(groups))


def _join(by_path: Mapping[str, Sequence[ShardFingerprint]]) -> dict[str, str]:
    """Return the fingerprints of whole arrays; raise if replicas differ."""
    fingerprints = {}
    odd = {}
    for path, shards in by_path.items():
        if devices := _odd_ones(shards):
            odd[path] = devices
        distinct = {shard.index: shard.value for shard in shards}
        low = sum(value & 0xFFFFFFFF for value in distinct.values()) & 0xFFFFFFFF
        high = sum(value >> 32 for value in distinct.values()) & 0xFFFFFFFF
        fingerprints[path] = f"{high:08x}{low:08x}"
    if odd:
        devices = sorted({device for group_devices in odd.values() for device in group_devices})
        names = ", ".join([*odd][:5]) + (", ..." if len(odd) > 5 else "")
        raise ReplicasDifferError(
            f"device {' and '.join(map(str, devices))}: holds other bits than its replicas, in"
            f" {len(odd)} of {len(fingerprints)} arrays: {names}"
        )
    return fingerprints


class RunningFingerprint:
    """Fingerprint of an array that is read in parts.

    Args:
        shape: Shape of the whole array.
    """

    def __init__(self, shape: Sequence[int]):
        self._shape = tuple(shape)
        self._sums = np.zeros(2, np.uint32)

    def add(self, part: Any, first: int = 0) -> None:
        """Add a part of the array, complete in all dimensions but the first.

        Args:
            part: Values of the part.
            first: Start of the part in the first dimension.
        """
        # In blocks, because summing takes several times the memory of its input.
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
        """Fingerprint as 16 hex digits, as in `fingerprints`."""
        high, low = self._sums.tolist()
        return f"{high:08x}{low:08x}"


def _odd_ones(shards: Sequence[ShardFingerprint]) -> list[int]:
    """Return the devices whose shard differs from most replicas; all, without a majority."""
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
    """Return the fingerprints of all shards of every array; every process must call this.

    Args:
        tree: Tree of named arrays on any mesh.
    """
    return _read(_begin(tree))


class _ReplicaGroup(NamedTuple):
    """Sums of the arrays of one mesh, or of none, which are being computed."""

    mesh: Mesh | None
    paths: list[str]
    places: list[tuple[tuple[int, ...], jax.sharding.Sharding]]
    """Shape and sharding of each array."""
    sums: list[Array]
    """One array for a mesh; otherwise one for each path."""


def _begin(tree: Any) -> list[_ReplicaGroup]:
    leaves = {path: _plain(leaf) for path, leaf in sorted(flatten(tree).items())}
    groups: dict[Any, list[str]] = {}
    for path, leaf in leaves.items():
        groups.setdefault(_mesh_of(leaf), []).append(path)
    begun = []
    for mesh, paths in groups.items():
        arrays = [leaves[path] for path in paths]
        sums = _on_one_device(arrays) if mesh is None else [_on_a_mesh(arrays, mesh)]
        places = [(array.shape, array.sharding) for array in arrays]
        begun.append(_ReplicaGroup(mesh, paths, places, sums))
    return begun


def _read(groups: Sequence[_ReplicaGroup]) -> dict[str, list[ShardFingerprint]]:
    fingerprints: dict[str, list[ShardFingerprint]] = {}
    for mesh, paths, places, arrays in groups:
        if mesh is None:
            sums = np.asarray([np.asarray(array) for array in arrays], np.uint32)[None]
        else:
            sums = _of_all_devices(arrays[0], mesh)
        for number, (path, (shape, placed)) in enumerate(zip(paths, places, strict=True)):
            fingerprints[path] = _name_activations(shape, placed, mesh, sums[:, number])
    return fingerprints


def _mesh_of(leaf: Array) -> Any:
    return leaf.sharding.mesh if isinstance(leaf.sharding, NamedSharding) else None


def _plain(leaf: Any) -> Array:
    leaf = jax.random.key_data(leaf) if is_key(leaf) else leaf
    return leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)


def _name_activations(
    shape: tuple[int, ...],
    placed: jax.sharding.Sharding,
    mesh: Mesh | None,
    sums: UInt32[np.ndarray, "devices 2"],
) -> list[ShardFingerprint]:
    where = placed.devices_indices_map(shape)
    devices = list(where) if mesh is None else list(mesh.devices.flat)
    shards = []
    for device, (high, low) in zip(devices, sums.tolist(), strict=True):
        index = tuple(
            slice(*part.indices(size)) for part, size in zip(where[device], shape, strict=True)
        )
        pairs = tuple((part.start, part.stop) for part in index)
        shards.append(ShardFingerprint(device.id, pairs, (high << 32) | low))
    return shards


def _on_one_device(arrays: Sequence[Array]) -> list[Array]:
    for array in arrays:
        if len(array.sharding.device_set) > 1:
            raise ValueError(
                f"an array of shape {array.shape} is on several devices by {array.sharding}: place"
                " it with jax.device_put and a NamedSharding"
            )
    return [_whole(array) for array in arrays]


@jax.jit
def _whole(array: Array) -> UInt32[Array, " 2"]:
    return _sums(array, [0] * array.ndim, array.shape)


@functools.partial(jax.jit, static_argnames="shape")
def _of_part(part: Array, starts: Array, shape: tuple[int, ...]) -> UInt32[Array, " 2"]:
    return _sums(part, list(starts), shape)


def _on_a_mesh(arrays: Sequence[Array], mesh: Mesh) -> Array:
    specs = tuple(cast(NamedSharding, array.sharding).spec for array in arrays)
    return _program(mesh, specs, tuple(array.shape for array in arrays))(*arrays)


def _of_all_devices(summed: Array, mesh: Mesh) -> UInt32[np.ndarray, "devices leaves 2"]:
    """Return the sums of each device of a mesh, which this process may wait for."""
    parts = {shard.device: np.asarray(shard.data) for shard in summed.addressable_shards}
    if not summed.is_fully_addressable:
        return next(iter(parts.values()))  # gathered by the program
    return np.concatenate([parts[device] for device in mesh.devices.flat])


@functools.lru_cache(maxsize=8)
def _program(mesh: Mesh, specs: tuple[PartitionSpec, ...], shapes: tuple[tuple[int, ...], ...]):
    """Return one compiled program that sums every device's shards of the whole state.

    It returns `[devices, leaves, 2]`: each device has its own row, and with several processes all.
    """
    sizes = dict(mesh.shape)
    is_gathered = len({device.process_index for device in mesh.devices.flat}) > 1

    def local(*shards: Array) -> UInt32[Array, "rows leaves 2"]:
        sums = []
        for shard, spec, shape in zip(shards, specs, shapes, strict=True):
            names = [*spec, *[None] * (len(shape) - len(spec))]
            starts = [
                _place(name, sizes) * size for name, size in zip(names, shard.shape, strict=True)
            ]
            sums.append(_sums(shard, starts, shape))
        local_sums = jnp.stack(sums)[None]
        return (
            jax.lax.all_gather(local_sums, mesh.axis_names, tiled=True)
            if is_gathered
            else local_sums
        )

    each = PartitionSpec() if is_gathered else PartitionSpec(mesh.axis_names)
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=each, check_vma=False))


def _place(names: Any, sizes: dict[str, int]) -> Any:
    """Return the index of this device's piece of a dimension; the first mesh axis is outermost."""
    names = () if names is None else (names,) if isinstance(names, str) else names
    place: Any = 0
    for name in names:
        place = place * sizes[name] + jax.lax.axis_index(name)
    return place


def _sums(shard: Array, starts: Sequence[Any], shape: Sequence[int]) -> UInt32[Array, " 2"]:
    """Return both sums of a shard that begins at `starts` in an array of this shape."""
    if shard.size == 0:  # XLA of jax 0.11 crashes on empty reductions
        return jnp.zeros(2, jnp.uint32)
    if jax.typeof(shard).memory_space == jax.memory.Space.Host:  # offloaded
        shard = jax.device_put(shard, jax.memory.Space.Device)
    index = jnp.zeros(shard.shape, jnp.uint32)
    for dimension, start in enumerate(starts):
        stride = jnp.uint32(math.prod(shape[dimension + 1 :]) % 2**32)
        positions = jax.lax.broadcasted_iota(jnp.uint32, shard.shape, dimension)
        index += (positions + jnp.asarray(start).astype(jnp.uint32)) * stride
    bits = _bits(shard)
    terms = tuple(bits * (_mix(index + jnp.uint32(s)) | 1) for s in _SEEDS)
    # One reduction for both sums: XLA vectorises it; two reductions take 40 times as long on a CPU.
    zeros = (jnp.uint32(0),) * len(terms)
    every = tuple(range(shard.ndim))
    return jnp.stack(
        jax.lax.reduce(terms, zeros, lambda lhs, rhs: tuple(map(jnp.add, lhs, rhs)), every)
    )


def _bits(x: Array) -> UInt32[Array, ...]:
    """Return the bits of each element as an unsigned integer."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    if x.dtype in (jnp.int4, jnp.uint4):  # bitcasts to 4 bits do not exist
        return x.astype(jnp.uint32)
    kinds = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}
    return jax.lax.bitcast_convert_type(x, kinds[x.dtype.itemsize]).astype(jnp.uint32)


def _mix(x: UInt32[Array, ...]) -> UInt32[Array, ...]:
    """Return a permutation of 32-bit integers (the finaliser of MurmurHash3)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
