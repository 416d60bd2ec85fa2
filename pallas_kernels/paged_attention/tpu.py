# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Implements paged_attention on TPUs: JAX's own ragged_paged_attention, which has limits.

One layer's pages read as [P G 2M H] are the layout that it takes.
"""

from typing import Any

import jax.numpy as jnp

from pallas_kernels.array_types import Array, Float, Int
from pallas_kernels.paged_attention.arguments import PagedRules, Pool, Tables, num_queries
from pallas_kernels.quantized_array import QuantizedArray

_KEYS_AT_ONCE = 512
_QUERIES_AT_ONCE = 32
"""Tokens of a block."""


def reason_against(*arrays: Any) -> str | None:
    """Return the limit of JAX's kernel that these sizes break; None if it takes them.

    Args:
        *arrays: Queries [T N H] and pages [L P G M 2 H] of a device; or nothing.
    """
    if not arrays:
        return None
    q, pool = arrays
    if isinstance(pool, QuantizedArray):
        return f"pages of {pool.dtype_name}"
    combined = 2 * pool.shape[3]
    packing = 4 // pool.dtype.itemsize
    if q.shape[-1] % 128:
        return f"heads of width {q.shape[-1]}, which must be a multiple of 128"
    rows, remainder = divmod(combined, packing)
    if remainder or (rows not in (1, 2, 4, 8) and rows % 8):
        return f"{pool.shape[3]} key heads on a device, which fill no tile of {pool.dtype}"
    return None


def paged_attention(
    q: Float[Array, "T N H"],
    pool: Pool,
    layer: Int[Array, ""],
    tables: Tables,
    positions: Int[Array, " T"],
    rules: PagedRules,
) -> Float[Array, "T N H"]:
    """Return attention; the rest of a piece that is not full computes numbers that are not read.

    Raises:
        ValueError: The sizes break a limit of the kernel.
    """
    if (limit := reason_against(q, pool)) is not None:
        raise ValueError(
            f"paged_attention: implementation='pallas_tpu', JAX's kernel for pages, does not take "
            f"{limit}: choose 'xla'"
        )
    from jax.experimental.pallas.ops.tpu import ragged_paged_attention as jax_kernel  # noqa: PLC0415

    layers, pages, size, heads, _, width = pool.shape
    flat = pool.reshape(layers * pages, size, 2 * heads, width)  # type: ignore[union-attr]
    table = jnp.concatenate(tables)
    singles = tables.singles.shape[0]
    pieces = tables.pieces.shape[0]
    length = num_queries(q, tables)
    starts = jnp.concatenate(
        [
            jnp.arange(singles, dtype=jnp.int32),
            singles + length * jnp.arange(pieces + 1, dtype=jnp.int32),
        ]
    )
    first = jnp.maximum(positions[starts[:-1]], 0)
    lengths = first + jnp.diff(starts)
    return jax_kernel.ragged_paged_attention(
        q,
        flat,
        lengths,
        layer * jnp.int32(pages) + table,
        starts,
        jnp.full((1,), singles + pieces, jnp.int32),
        sm_scale=rules.scale,
        sliding_window=rules.window,
        soft_cap=rules.softcap,
        # The kernel's own table of sizes asks the device of this process, which may be another.
        num_kv_pages_per_block=min(table.shape[1], max(_KEYS_AT_ONCE // size, 1)),
        num_queries_per_block=min(q.shape[0], _QUERIES_AT_ONCE),
    )
