# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The one room where names that moved between jax 0.10, 0.11 and 0.12 are settled.

Everything here is named after what it does, never after a version, and is written so that all
supported versions run it. Which name moved when is said beside the function.

It also holds what touches the types of a manual region (`jax.shard_map`), because their spelling
moved most: jax 0.9 still said `aval.vma`, today it is `jax.typeof(x).mat.varying`.

To add a name: import it from here everywhere, and say in one line which versions differ.
"""

import jax

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
    varying = frozenset().union(*(jax.typeof(other).mat.varying for other in like))
    return vary_over(x, tuple(sorted(varying)))


def vary_over(x: Array, axes: tuple[str, ...]) -> Array:
    """Lets `x` vary over these manual mesh axes as well.

    Args:
        x: Any array, in a manual region with `check_vma`.
        axes: Names of mesh axes.
    """
    missing = tuple(axis for axis in axes if axis not in jax.typeof(x).mat.varying)
    return jax.lax.pcast(x, missing, to="varying") if missing else x
