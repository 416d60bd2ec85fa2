# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Reference of paged_attention: the masked softmax over gathered pages, in float32.

It stores the scores of every query with every slot of its table.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import Array, Float, Int
from pallas_kernels.paged_attention.arguments import PagedRules, Pool, Tables
from pallas_kernels.quantized_array import QuantizedArray, dequantize


def paged_attention(
    q: Float[Array, "T N H"],
    pool: Pool,
    layer: Int[Array, ""],
    tables: Tables,
    positions: Int[Array, " T"],
    rules: PagedRules,
) -> Any:
    """Return what `pallas_kernels.paged_attention` returns."""
    count = tables.singles.shape[0]
    parts = []
    if count:
        parts.append(_part(q[:count], pool, layer, tables.singles, positions[:count], rules))
    if tables.pieces.shape[0]:
        parts.append(_part(q[count:], pool, layer, tables.pieces, positions[count:], rules))
    out = jnp.concatenate([out for out, _ in parts])
    return (out, jnp.concatenate([lse for _, lse in parts])) if rules.returns_lse else out


def _part(
    q: Array, pool: Pool, layer: Array, table: Array, positions: Array, rules: PagedRules
) -> tuple[Array, Array]:
    rows, (heads, width) = table.shape[0], q.shape[1:]
    pages = jax.tree.map(lambda array: array[layer, table], pool)  # [B W G M 2 H]
    pages = dequantize(pages, jnp.float32) if isinstance(pages, QuantizedArray) else pages
    pages = pages.astype(jnp.float32)
    pages = pages.reshape(rows, -1, *pages.shape[3:])
    queries = q.astype(jnp.float32).reshape(rows, -1, heads, width)
    slots = jnp.arange(pages.shape[1], dtype=jnp.int32)
    distance = positions.reshape(rows, -1, 1) - slots[None, None]
    sees = distance >= 0
    if rules.window is not None:
        sees &= distance < rules.window
    if rules.chunk is not None:
        sees &= positions.reshape(rows, -1, 1) // rules.chunk == slots[None, None] // rules.chunk
    # What no query sees may be anything, NaN included.
    pages = jnp.where(sees.any(1)[:, :, None, None, None], pages, 0.0)
    pages = jnp.repeat(pages, heads // pages.shape[2], axis=2)
    k = pages[..., 0, :]
    v = pages[..., 1, :]
    logits = rules.scale * jnp.einsum("bsnh,bunh->bnsu", queries, k, precision="highest")
    if rules.softcap is not None:
        logits = rules.softcap * jnp.tanh(logits / rules.softcap)
    weights = jnp.where(sees[:, None], jax.nn.softmax(logits, where=sees[:, None], axis=-1), 0.0)
    out = jnp.einsum("bnsu,bunh->bsnh", weights, v, precision="highest")
    lse = jax.nn.logsumexp(logits, axis=-1, where=sees[:, None]).swapaxes(1, 2)
    return out.reshape(q.shape).astype(q.dtype), lse.reshape(q.shape[:2])
