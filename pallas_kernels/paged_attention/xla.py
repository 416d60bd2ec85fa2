# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Implements paged_attention without a kernel: gathers the pages of a row, then flash_attention."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import Array, Float, Int
from pallas_kernels.flash_attention import flash_attention
from pallas_kernels.paged_attention.arguments import PagedRules, Pool, Tables
from pallas_kernels.quantized_array import QuantizedArray, dequantize


def attend_gathered(
    q: Float[Array, "T N H"],
    pool: Any,
    layer: Int[Array, ""],
    tables: Tables,
    positions: Int[Array, " T"],
    rules: PagedRules,
    split: Callable[[Array], tuple[Array, Array]],
) -> Any:
    """Gather the pages of each sequence, and attend to them as to a row.

    It returns the output [T N Hv], and with `rules.returns_lse` the log-sum-exp [T N] too.

    Args:
        q: Queries, as for `paged_attention`.
        pool: Pages [L P G ...] that hold the new tokens already.
        layer: Layer that is read.
        tables: Pages of the sequences.
        positions: Positions of the queries.
        rules: Mask and kernel.
        split: Function of the entries of some rows [B U ...] to keys and values [B U M H].
    """
    pages, size = pool.shape[1:3]

    def part(q: Array, table: Array, positions: Array) -> tuple[Array, Array]:
        rows, width = table.shape

        def gather(array: Array) -> Array:
            # From all layers at once: taking the layer first would copy its pages.
            flat = array.reshape(-1, *array.shape[2:])
            gathered = flat.at[layer * jnp.int32(pages) + table].get(mode="clip")
            return gathered.reshape(rows, width * size, *array.shape[3:])

        gathered = jax.tree.map(gather, pool)
        is_few = isinstance(gathered, QuantizedArray)
        k, v = split(dequantize(gathered, q.dtype) if is_few else gathered.astype(q.dtype))
        q_positions = positions.reshape(rows, -1)
        kv_positions = jnp.arange(width * size, dtype=jnp.int32)
        chunks = {}
        if rules.chunk is not None:
            chunks["q_segment_ids"] = q_positions // jnp.int32(rules.chunk)
            kv_chunks = kv_positions // jnp.int32(rules.chunk)
            chunks["kv_segment_ids"] = jnp.broadcast_to(kv_chunks, (rows, width * size))
        out, lse = flash_attention(
            q.reshape(rows, -1, *q.shape[1:]),
            k,
            v,
            q_positions=q_positions,
            kv_positions=kv_positions,
            **chunks,
            window=rules.window,
            softcap=rules.softcap,
            scale=rules.scale,
            implementation=rules.requested,
        )
        return out.reshape(*q.shape[:2], -1), lse.swapaxes(1, 2).reshape(q.shape[:2])

    count = tables.singles.shape[0]
    parts = []
    if count:
        parts.append(part(q[:count], tables.singles, positions[:count]))
    if tables.pieces.shape[0]:
        parts.append(part(q[count:], tables.pieces, positions[count:]))
    out = jnp.concatenate([out for out, _ in parts])
    return (out, jnp.concatenate([lse for _, lse in parts])) if rules.returns_lse else out


def paged_attention(
    q: Float[Array, "T N H"],
    pool: Pool,
    layer: Int[Array, ""],
    tables: Tables,
    positions: Int[Array, " T"],
    rules: PagedRules,
) -> Any:
    """Return what `pallas_kernels.paged_attention` returns."""

    def halves(pages: Array) -> tuple[Array, Array]:
        return pages[..., 0, :], pages[..., 1, :]

    return attend_gathered(q, pool, layer, tables, positions, rules, halves)
