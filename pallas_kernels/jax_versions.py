# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The one room where names that moved between jax 0.10, 0.11 and 0.12 are settled.

Everything here is named after what it does, never after a version, and is written so that all
supported versions run it. Which name moved when is said beside the function.

It also holds what touches the types of a manual region (`jax.shard_map`), because their spelling
moved most: jax 0.9 still said `aval.vma`, today it is `jax.typeof(x).mat.varying`.

To add a name: import it from here everywhere, and say in one line which versions differ.
"""

import importlib
import inspect
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import Array


def match_varying(x: Array, *like: Array) -> Array:
    """Lets `x` vary over every manual mesh axis over which `x` or one of `like` varies.

    Inside `jax.shard_map` with `check_vma=True` the type of an array says over which mesh axes
    its values may differ. A constant varies over none, so that it does not fit, for example, as
    the first carry of a scan whose body returns values that do vary. The transpose of this cast
    is a sum over the same axes: the gradient of a replicated array comes back summed.

    Args:
        x: Any array.
        like: Arrays that `x` will be combined with.

    Returns:
        `x`, unchanged in value. Outside a manual region, or without `check_vma`, `x` itself.
    """
    return vary_over(x, varying_axes(*like))


def varying_axes(*arrays: Array) -> tuple[str, ...]:
    """The manual mesh axes over which one of these arrays varies, in the order of the alphabet.

    Args:
        arrays: In a manual region with `check_vma`; elsewhere there are none.
    """
    return tuple(sorted(frozenset().union(*(jax.typeof(x).mat.varying for x in arrays))))


def vary_over(x: Array, axes: tuple[str, ...]) -> Array:
    """Lets `x` vary over these manual mesh axes as well.

    Args:
        x: Any array, in a manual region with `check_vma`.
        axes: Names of mesh axes.
    """
    missing = tuple(axis for axis in axes if axis not in jax.typeof(x).mat.varying)
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def agreed(x: Array) -> Array:
    """What every device has computed alike, of arrays whose type says that they may differ.

    Args:
        x: Of equal value everywhere.

    Returns:
        Its mean over the axes over which it may vary, which then varies over none.
    """
    varying = tuple(sorted(jax.typeof(x).mat.varying))
    return jax.lax.pmean(x, varying) if varying else x


def shape_varying_like(
    shape: tuple[int, ...], dtype: jnp.dtype | type, *like: Array
) -> jax.ShapeDtypeStruct:
    """The shape of a kernel's result, which varies over the mesh axes of all of `like`.

    `pallas_call` cannot tell by itself inside `jax.shard_map` with `check_vma=True`. jax 0.9 had
    `vma=`, today it is `manual_axis_type=`.

    Args:
        shape: of the result.
        dtype: of the result.
        like: the kernel's operands.
    """
    varying = frozenset().union(*(jax.typeof(x).mat.varying for x in like))
    if not varying:
        return jax.ShapeDtypeStruct(shape, dtype)
    kind = jax.sharding.ManualAxisType(varying=varying)
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=kind)


class _MosaicGpu:
    """`jax.experimental.pallas.mosaic_gpu`, imported when something is taken from it: it takes a
    third of a second, and writes to os.environ."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module("jax.experimental.pallas.mosaic_gpu"), name)


mosaic_gpu: Any = _MosaicGpu()


def transposed_ref(ref: Any) -> Any:
    """A matrix in the shared memory of a GPU, read the other way round: `plgpu.transpose_ref` on
    0.10, a method from 0.11 on."""
    if hasattr(ref, "transpose"):
        return ref.transpose((1, 0))
    return mosaic_gpu.transpose_ref(ref, (1, 0))


def load_arranged(ref: Any, layout: Any) -> Any:
    """A vector from a GPU's memory in the given layout: on 0.10 `plgpu.load` wants an index."""
    return _load(ref, layout=layout, optimized=False)


def load_tile(ref: Any, layout: Any) -> Array:
    """A matrix from a GPU's shared memory in the given layout, or an error where the banks of that
    memory would serve it slowly."""
    return _load(ref, layout=layout)


def _load(ref: Any, **options: Any) -> Array:
    index = inspect.signature(mosaic_gpu.load).parameters.get("idx")
    wants_index = index is not None and index.default is inspect.Parameter.empty
    return mosaic_gpu.load(ref, *([()] if wants_index else []), **options)


def interpreted_gpu(**options: Any) -> Any:
    """What makes `plgpu.kernel(interpret=...)` run on the CPU: public from 0.11 on."""
    if hasattr(mosaic_gpu, "InterpretGPUParams"):
        return mosaic_gpu.InterpretGPUParams(**options)
    private = importlib.import_module("jax._src.pallas.mosaic_gpu.interpret.params")
    return private.InterpretGPUParams(**options)


def cuda_version() -> int | None:
    """Of the CUDA runtime that JAX has loaded, 12090 for 12.9; None without. No public name yet."""
    versions = getattr(importlib.import_module("jax._src.lib"), "cuda_versions", None)
    return None if versions is None else int(versions.cuda_runtime_get_version())


def coordination_client() -> Any:
    """The client of the coordination service that the processes of a job share; None where there
    is one process. JAX has it under a private name alone, the same in 0.10 to 0.12."""
    return importlib.import_module("jax._src.distributed").global_state.client
