# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Provides names that moved between jax 0.10, 0.11 and 0.12.

Functions are named after what they do and run on all supported versions; each docstring names the
versions that differ. The functions on types of a manual region (`jax.shard_map`) are here too,
because their spelling moved most: jax 0.9 had `aval.vma`, today it is `jax.typeof(x).mat.varying`.

To add a name: a function in `pallas_kernels/jax_versions.py` that names the versions that differ.
"""

import importlib
import inspect
import time
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import Array


def match_varying(x: Any, *like: Any) -> Any:
    """Let the arrays of `x` vary over every manual mesh axis over which one of `like` varies.

    Inside `jax.shard_map` with `check_vma=True` the type of an array names the mesh axes over which
    its values may differ. A constant varies over none, so that it does not fit, for example, as the
    first carry of a scan whose body returns varying values. The transpose of this cast is a sum
    over the same axes: the gradient of a replicated array comes back summed.

    Args:
        x: Pytree of arrays.
        like: Pytrees of arrays that `x` will be combined with.

    Returns:
        `x`, unchanged in value. Outside a manual region, or without `check_vma`, `x` itself.
    """
    axes = varying_axes(*like)
    return jax.tree.map(lambda leaf: vary_over(leaf, axes), x)


def varying_axes(*arrays: Any) -> tuple[str, ...]:
    """Return the manual mesh axes over which one of the arrays varies, sorted by name.

    Args:
        arrays: Pytrees of arrays in a manual region with `check_vma`; elsewhere the result is
            empty.
    """
    axes = (jax.typeof(leaf).mat.varying for leaf in jax.tree.leaves(arrays))
    return tuple(sorted(frozenset().union(*axes)))


def vary_over(x: Array, axes: tuple[str, ...]) -> Array:
    """Let `x` vary over these manual mesh axes as well.

    Args:
        x: Any array, in a manual region with `check_vma`.
        axes: Names of mesh axes.
    """
    missing = tuple(axis for axis in axes if axis not in jax.typeof(x).mat.varying)
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def as_unvarying(x: Array) -> Array:
    """Return an array that is equal on all devices as one of non-varying type.

    Args:
        x: Array of equal value everywhere, whose type may say that it varies.

    Returns:
        Its mean over the axes over which it may vary; it varies over none.
    """
    varying = tuple(sorted(jax.typeof(x).mat.varying))
    return jax.lax.pmean(x, varying) if varying else x


def shape_varying_like(
    shape: tuple[int, ...], dtype: jnp.dtype | type, *like: Any
) -> jax.ShapeDtypeStruct:
    """Return the shape of a kernel's result, which varies over the mesh axes of all of `like`.

    `pallas_call` needs it inside `jax.shard_map` with `check_vma=True`. jax 0.9 had `vma=`, today
    it
    is `manual_axis_type=`.

    Args:
        shape: Shape of the result.
        dtype: Dtype of the result.
        like: Operands of the kernel, as pytrees.
    """
    varying = frozenset(varying_axes(*like))
    if not varying:
        return jax.ShapeDtypeStruct(shape, dtype)
    kind = jax.sharding.ManualAxisType(varying=varying)
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=kind)


class _MosaicGpu:
    """`jax.experimental.pallas.mosaic_gpu`, imported on first use.

    The import takes a third of a second and writes to os.environ.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module("jax.experimental.pallas.mosaic_gpu"), name)


mosaic_gpu: Any = _MosaicGpu()


def transposed_ref(ref: Any) -> Any:
    """Return a transposed reference to a matrix in shared memory of a GPU.

    `plgpu.transpose_ref` on 0.10, a method from 0.11 on.
    """
    if hasattr(ref, "transpose"):
        return ref.transpose((1, 0))
    return mosaic_gpu.transpose_ref(ref, (1, 0))


def load_arranged(ref: Any, layout: Any) -> Any:
    """Load a vector from a GPU's memory in a layout; `plgpu.load` needs an index on 0.10."""
    return _load(ref, layout=layout, optimized=False)


def load_tile(ref: Any, layout: Any) -> Array:
    """Load a matrix from a GPU's shared memory in a layout.

    It raises where bank conflicts would make the load slow.
    """
    return _load(ref, layout=layout)


def store_in_global(ref: Any, value: Array) -> None:
    """Store an array that is in registers in a GPU's global memory, rows of any length.

    A plain assignment is one on 0.10 and 0.11; 0.12 refuses it where rows are no whole cache lines.
    """
    if hasattr(mosaic_gpu, "store"):
        mosaic_gpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


def _load(ref: Any, **options: Any) -> Array:
    index = inspect.signature(mosaic_gpu.load).parameters.get("idx")
    wants_index = index is not None and index.default is inspect.Parameter.empty
    return mosaic_gpu.load(ref, *([()] if wants_index else []), **options)


def cuda_version() -> int | None:
    """Return the version of the loaded CUDA runtime, 12090 for 12.9; None without CUDA."""
    versions = getattr(importlib.import_module("jax._src.lib"), "cuda_versions", None)
    return None if versions is None else int(versions.cuda_runtime_get_version())


def coordination_client() -> Any:
    """Return the client of the coordination service of a job; None for one process.

    JAX has it under a private name only, the same in 0.10 to 0.12.
    """
    return importlib.import_module("jax._src.distributed").global_state.client


def delay_coordination_shutdown(seconds: float) -> None:
    """Let the coordination service, if this process has it, end some time after its last client.

    JAX ends both at once when the interpreter exits. A call of a client that arrives meanwhile
    makes gRPC abort the process ("Check failed: queue.Pop() == nullptr"), whatever its exit code.

    Args:
        seconds: Time for the last calls of the clients.
    """
    state = importlib.import_module("jax._src.distributed").global_state
    if state.service is not None:
        state.service = _DelayedService(state.service, seconds)


class _DelayedService:
    """A coordination service that waits before it ends."""

    def __init__(self, service: Any, seconds: float):
        self._service = service
        self._seconds = seconds

    def shutdown(self) -> None:
        time.sleep(self._seconds)
        self._service.shutdown()


def loop_counts(params: dict[str, Any]) -> tuple[int, int]:
    """Return the numbers of constants and of carried values of a `scan`.

    Args:
        params: Parameters of its equation; jax 0.11 and newer have trees instead.
    """
    if "ft_in" in params:
        constants, carry, _ = params["ft_in"].unpack()
        return len(constants), len(carry)
    return params["num_consts"], params["num_carry"]
