# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Formats of cached keys and values: the compute dtype, or 8 or 4 bits with scales.

    k ~ values * scales        a scale for each token, head and group of at most 64 features

Each token is rounded once, when it is written, and dequantised for every attention to it. Scales
per token need no statistics of other tokens, so that one token can be appended at a time. Keys are
rounded after their norm and rotation.

    bytes of one token    layers * heads * 2 * (H * bits / 8 + H / group * 4)

Grouped scales per token: KIVI (arXiv 2402.02750, section 3) uses them for values, and scales keys
by channel over groups of tokens; for normed keys, or 8 bits, scales per token are enough.

To add a format that `pallas_kernels.quantize` has: its name in `CacheFormat` and its bits in
`_BITS`, both in sharding/sequence_parallel/cache_formats.py.
"""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import QuantizedArray, dequantize, quantize

CacheFormat = Literal["compute", "int8", "int4"]
"""compute: the dtype in which attention computes them."""

LARGEST_GROUP = 64
"""Most features of a head that share a scale; a divisor of the head's width is taken."""

_BITS = {"int8": 8, "int4": 4}
_SCALE_BITS = 32


def into_cache(
    new: Float[Array, "B S M H"], entries: Float[Array, "L B U M H"] | QuantizedArray
) -> Float[Array, "B S M H"] | QuantizedArray:
    """Return keys or values in the format of a cache.

    Args:
        new: Keys or values of some tokens.
        entries: Those of the cache.
    """
    if not isinstance(entries, QuantizedArray):
        return new.astype(entries.dtype)
    group = entries.shape[-1] // entries.num_blocks
    return quantize(new, entries.dtype_name, axis=-1, block_size=group)


def out_of_cache(
    entries: Float[Array, "B U M H"] | QuantizedArray, dtype: Any
) -> Float[Array, "B U M H"]:
    """Return the entries of a cache in the dtype of attention.

    Args:
        entries: Keys or values of the cache.
        dtype: Dtype of the result.
    """
    if isinstance(entries, QuantizedArray):
        return dequantize(entries, dtype)
    return entries.astype(dtype)


def as_cached(x: Float[Array, "B S M H"], form: CacheFormat) -> Float[Array, "B S M H"]:
    """Return keys or values as attention would read them from a cache.

    Args:
        x: Keys or values of some tokens.
        form: Format of the cache.
    """
    if form == "compute":
        return x
    return dequantize(quantize(x, form, axis=-1, block_size=_group(x.shape[-1])), x.dtype)


def empty_slots(
    shape: tuple[int, ...], form: CacheFormat, dtype: Any
) -> Float[Array, "*L B U M H"] | QuantizedArray:
    """Return keys or values of an empty cache.

    Args:
        shape: Shape, with the width of a head last.
        form: Format of the cache.
        dtype: Dtype of the compute format.
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
    """Return the bytes of a cache for one token of one sequence.

    Args:
        num_layers: L.
        num_kv_heads: M.
        head_dim: H.
        form: Format of the cache.
        dtype: Dtype of the compute format.
    """
    bits = head_dim * jax.dtypes.itemsize_bits(dtype)
    if form != "compute":
        bits = head_dim * _BITS[form] + head_dim // _group(head_dim) * _SCALE_BITS
    return num_layers * num_kv_heads * 2 * bits // 8


def _group(head_dim: int) -> int:
    """Return the largest divisor of the head's width that may share a scale."""
    return max(d for d in range(1, min(head_dim, LARGEST_GROUP) + 1) if head_dim % d == 0)
