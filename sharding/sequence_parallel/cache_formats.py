# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""In what a cache holds keys and values: the compute dtype, or 8 or 4 bits with scales.

    k ~ values * scales        a scale for each token, head and group of at most 64 features

Each token is rounded once, when it is written, and turned back for every attention to it. Scales
per token need no statistics of other tokens, so that a cache grows by one token like any other.
Keys are rounded as they are stored, after their norm and rotation.

    bytes of one token    layers * heads * 2 * (H * bits / 8 + H / group * 4)

Grouped scales per token: KIVI (arXiv 2402.02750, section 3) has them for values, and takes keys by
channel over some tokens at a time; with keys that are normed, or in 8 bits, a token will do.

To add a format: its name here, if `pallas_kernels.quantize` has it.
"""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import QuantizedArray, dequantize, quantize

CacheFormat = Literal["compute", "int8", "int4"]
"""compute: as attention has computed them."""

LARGEST_GROUP = 64
"""Features of a head that share a scale, at most; a divisor of the head's width."""

_BITS = {"int8": 8, "int4": 4}
_SCALE_BITS = 32


def into_cache(
    new: Float[Array, "B S M H"], held: Float[Array, "B U M H"] | QuantizedArray
) -> Float[Array, "B S M H"] | QuantizedArray:
    """Keys or values in the format of a cache.

    Args:
        new: of some tokens.
        held: of the cache.
    """
    if not isinstance(held, QuantizedArray):
        return new.astype(held.dtype)
    group = held.shape[-1] // held.num_blocks
    return quantize(new, held.dtype_name, axis=-1, block_size=group)


def out_of_cache(
    held: Float[Array, "B U M H"] | QuantizedArray, dtype: Any
) -> Float[Array, "B U M H"]:
    """What a cache holds, for attention.

    Args:
        held: keys or values.
        dtype: of the result.
    """
    if isinstance(held, QuantizedArray):
        return dequantize(held, dtype)
    return held.astype(dtype)


def as_cached(x: Float[Array, "B S M H"], form: CacheFormat) -> Float[Array, "B S M H"]:
    """Keys or values as attention would read them from a cache.

    Args:
        x: of some tokens.
        form: of the cache.
    """
    if form == "compute":
        return x
    return dequantize(quantize(x, form, axis=-1, block_size=_group(x.shape[-1])), x.dtype)


def empty_slots(
    shape: tuple[int, ...], form: CacheFormat, dtype: Any
) -> Float[Array, "*L B U M H"] | QuantizedArray:
    """Keys or values of an empty cache.

    Args:
        shape: heads' width last.
        form: of the cache.
        dtype: of the compute format.
    """
    if form == "compute":
        return jnp.zeros(shape, dtype)
    scales = (*shape[:-1], shape[-1] // _group(shape[-1]))
    return QuantizedArray(
        values=jnp.zeros(shape, form), scales=jnp.ones(scales, jnp.float32), axis=-1
    )


def bytes_per_token(
    *, num_layers: int, num_kv_heads: int, head_dim: int, form: CacheFormat, dtype: Any
) -> int:
    """Bytes that a cache takes for one token of one sequence.

    Args:
        num_layers: L.
        num_kv_heads: M.
        head_dim: H.
        form: of the cache.
        dtype: of the compute format.
    """
    bits = head_dim * jax.dtypes.itemsize_bits(dtype)
    if form != "compute":
        bits = head_dim * _BITS[form] + head_dim // _group(head_dim) * _SCALE_BITS
    return num_layers * num_kv_heads * 2 * bits // 8


def _group(head_dim: int) -> int:
    """The largest divisor that may share a scale."""
    return max(d for d in range(1, min(head_dim, LARGEST_GROUP) + 1) if head_dim % d == 0)
