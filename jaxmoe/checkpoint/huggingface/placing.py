# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Places the parameters of a model on devices while they are read from tensors of `transformers`.

A parameter is stacked over layers, and its tensors are of one layer, or of one expert. Each part
that a few tensors fill is read once, cast, cut for each device, and written into the shard there,
before the next one is read. The host holds one part: a layer, some experts of a layer, or the
largest tensor. Processes read the parts that their devices need.

    CPU             shards are arrays of the host, which devices use without a copy
    others          shards are zeros on the device, which donated updates fill
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, Sharding

from jaxmoe.checkpoint.huggingface.filling import align
from jaxmoe.checkpoint.huggingface.weights import ROUTER_STATE, Index, Tensors
from jaxmoe.parameters import ParameterSpec
from sharding.mesh import named_shardings
from sharding.rules import LogicalAxisRules


def load(
    tensors: Tensors,
    *,
    mesh: Mesh | None,
    axis_rules: LogicalAxisRules,
    dtype: Any = np.float32,
) -> tuple[dict[str, Any], Any]:
    """Return the parameters, in a dtype, and the router state of a model, f32.

    Args:
        tensors: Source of the values.
        mesh: Mesh to place them on; one device when None.
        axis_rules: Rules from logical axes to mesh axes.
        dtype: Dtype of the parameters.
    """
    if mesh is not None:
        tensors.table.check_divides(axis_rules, dict(mesh.shape))

    def build(row: ParameterSpec, dtype: Any) -> jax.Array:
        named_sharding = jnp.zeros(()).sharding if mesh is None else named_shardings(row.spec, mesh)
        return _place(tensors, row, named_sharding, jnp.dtype(dtype))

    params = tensors.table.tree(functools.partial(build, dtype=dtype))
    state = tensors.state_table.tree(functools.partial(build, dtype=np.float32))
    return params, state.get(ROUTER_STATE, {})


def _place(tensors: Tensors, row: ParameterSpec, named_sharding: Sharding, dtype: Any) -> jax.Array:
    """Return a parameter on its devices; its parts are read one after the other."""
    places = named_sharding.addressable_devices_indices_map(row.shape)
    shards = [
        _new_shard(device, _bounds(row.shape, index), dtype) for device, index in places.items()
    ]

    def is_needed(part: Index) -> bool:
        return any(_overlap(part, shard.index) is not None for shard in shards)

    for part, values in tensors.parts(row, is_needed):
        values = values.astype(dtype, copy=False)
        for shard in shards:
            shard.write(part, values)
    arrays = [shard.array() for shard in shards]
    return jax.make_array_from_single_device_arrays(row.shape, named_sharding, arrays)


def _new_shard(device: jax.Device, index: Index, dtype: Any) -> HostShard | DeviceShard:
    kind = HostShard if device.platform == "cpu" else DeviceShard
    return kind(device, index, dtype)


class HostShard:
    """Shard of a device that computes in the memory of the host.

    Args:
        device: Its device.
        index: Its place in the parameter.
        dtype: Dtype of its values.
    """

    def __init__(self, device: jax.Device, index: Index, dtype: Any):
        self.index = index
        self._device = device
        shape = _shape(index)
        self._values = align(math.prod(shape), dtype).reshape(shape)

    def write(self, part: Index, values: np.ndarray) -> None:
        """Copy the values of a part that are in the shard."""
        if (common := _overlap(part, self.index)) is not None:
            if common == self.index == part and _is_aligned(values):
                self._values = values
                return
            self._values[_slices(common, self.index)] = values[_slices(common, part)]

    def array(self) -> jax.Array:
        """Return the values on the device, without a copy."""
        return jax.device_put(self._values, self._device)


class DeviceShard:
    """Shard in the memory of an accelerator.

    Args:
        device: Its device.
        index: Its place in the parameter.
        dtype: Dtype of its values.
    """

    def __init__(self, device: jax.Device, index: Index, dtype: Any):
        self.index = index
        self._device = device
        self._dtype = dtype
        self._values: jax.Array | None = None

    def write(self, part: Index, values: np.ndarray) -> None:
        """Move the values of a part that are in the shard, and write them there."""
        if (common := _overlap(part, self.index)) is None:
            return
        moved = jax.device_put(values[_slices(common, part)], self._device)
        if common == self.index:
            self._values = moved
            return
        first = [part.start for part in _slices(common, self.index)]
        with jax.set_mesh(_mesh_of(self._device)):  # the caller's has other devices
            values_there = self._values
            if values_there is None:
                values_there = jnp.zeros(_shape(self.index), self._dtype, device=self._device)
            values_there = _update(values_there, moved, np.array(first, np.int32))
        self._values = values_there.block_until_ready()  # else parts wait in the host's memory

    def array(self) -> jax.Array:
        """Return the values on the device."""
        assert self._values is not None  # every parameter has tensors
        return self._values


@functools.lru_cache(maxsize=16)
def _mesh_of(device: jax.Device) -> Mesh:
    return Mesh(np.array([device]), ("device",))


@functools.partial(jax.jit, donate_argnums=0)
def _update(values: jax.Array, part: jax.Array, first: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice(values, part, list(first))


def _bounds(shape: Sequence[int], index: tuple[slice, ...] | None) -> Index:
    """Return the place of a shard with numbers for open ends."""
    assert index is not None  # of a device of this process
    slices = (*index, *(slice(None),) * (len(shape) - len(index)))
    return tuple(
        (part.start or 0, size if part.stop is None else part.stop)
        for part, size in zip(slices, shape, strict=True)
    )


def _shape(index: Index) -> tuple[int, ...]:
    return tuple(end - begin for begin, end in index)


def _overlap(a: Index, b: Index) -> Index | None:
    """Return the place that two places have in common; None without any."""
    common = tuple(
        (max(first, second), min(end, end_of_second))
        for (first, end), (second, end_of_second) in zip(a, b, strict=True)
    )
    return common if all(begin < end for begin, end in common) else None


def _slices(common: Index, outer: Index) -> tuple[slice, ...]:
    """Return where a place is within one that holds it."""
    return tuple(
        slice(begin - first, end - first)
        for (begin, end), (first, _) in zip(common, outer, strict=True)
    )


def _is_aligned(values: np.ndarray) -> bool:
    return values.flags.c_contiguous and values.ctypes.data % 64 == 0
