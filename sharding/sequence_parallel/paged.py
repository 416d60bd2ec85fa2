# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Attention of many sequences over one pool of pages of keys and values.

    kv [L P G M 2 H]    page p of layer l holds G positions; keys and values alternate
    table [rows W]      pages of a row's sequence, in order: position u is at page table[u // G]

The new tokens of a step are one row of T: R sequences with one token each, then P sequences with C
tokens each. Everything else of a layer computes the row as it is. Attention writes the T tokens at
their slots, and computes [R, 1] and [P, C] queries apart, so that no query pays for the padding of
another. The order of a page in its table is its position, so slots that are not filled yet are the
future.

`pallas_kernels.paged_attention` reads the pages: a kernel where they are, "xla" by a gather.

Pages may hold few bits with scales for each token (`sharding/sequence_parallel/cache_formats.py`).
The pool travels in the carry of the loop over layers and is written in place
(`sharding/sequence_parallel/cached.py`). Heads are cut over the tensor axis; pages are not cut.

Source of the layout: PagedAttention, arXiv 2309.06180, section 4.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import QuantizedArray, paged_attention, quantize
from sharding import axes as ax
from sharding.constrain import Placement
from sharding.sequence_parallel.cache_formats import CacheFormat, empty_slots
from sharding.sequence_parallel.cached import NewTokens
from sharding.sequence_parallel.local_attention import AttentionRules, Seen

PAGE_AXES = (None, None, None, ax.ACT_KV_HEADS, None, None)
"""Logical axes of a pool."""

Pool = Float[Array, "L P G M 2 H"] | QuantizedArray
"""Pages of keys and values; the scales of few bits have as many dimensions."""


class PageTables(NamedTuple):
    """Places of the tokens of a step, the same for all layers."""

    slots: Int[Any, " T"]
    """Slot of each new token, page * G + place in it; P * G and more for padding."""
    singles: Int[Any, "R W"]
    """Pages of the sequences with one new token."""
    pieces: Int[Any, "P W"]
    """Pages of the sequences with up to C new tokens; entries that are not used are any page."""


TABLE_AXES = PageTables((None,), (None, None), (None, None))
"""Logical axes of the tables."""


class PagedCache(NamedTuple):
    """Pages of a stack of layers, and the places of the tokens of a step."""

    pool: Pool
    tables: PageTables

    def attend(
        self, new: NewTokens, *, placement: Placement, rules: AttentionRules
    ) -> tuple[Float[Array, "1 T N H"], Seen, PagedCache]:
        """Write new keys and values into pages and attend to the pages of each sequence.

        Args:
            new: Tokens [1 T] to write and to attend with; -1 is the position of padding.
            placement: Layout rules.
            rules: Mask and kernel.

        Returns:
            The output, the log-sum-exp alone if the rules keep it, and the pages with the new
            tokens.

        Raises:
            ValueError: Logits are to be watched, or the attention is not causal.
        """
        check_causal(rules)
        if rules.is_observed:
            raise ValueError(
                "pages serve requests and report no attention logits: set execution.telemetry to"
                " brief"
            )
        new_axes = new.axes()
        pages = page_axes(self.pool)

        def run(new, pool, tables, *, batch_axes):
            del batch_axes
            entries = jnp.stack([new.k[0], new.v[0]], axis=2)
            pool = write_pages(pool, entries, new.layer, tables.slots)
            out = attend_pages(new.q[0], pool, new.layer, tables, new.positions[0], rules)
            if not rules.keeps_lse:
                return out[None], {}, pool
            out, lse = out
            return out[None], {"lse": lse.T[None]}, pool

        seen = dict.fromkeys(rules.seen, (ax.ACT_BATCH, ax.ACT_HEADS, None))
        region = placement.region(
            run, in_axes=(new_axes, pages, TABLE_AXES), out_axes=(new_axes.q, seen, pages)
        )
        out, sums, pool = region(new, self.pool, self.tables)
        return out, sums, PagedCache(pool, self.tables)


def check_causal(rules: AttentionRules) -> None:
    """Raise unless a query sees no later key: slots that are not filled yet are the future.

    Args:
        rules: Mask of a layer.

    Raises:
        ValueError: It does.
    """
    if not rules.is_causal:
        raise ValueError(
            "pages serve causal attention only: set model.attention.is_causal, or generate with"
            " jaxmoe.generate"
        )


def page_axes(pool: Any) -> Any:
    """Return the logical axes of each array of a pool; those of latents are not cut."""
    rank = len(PAGE_AXES)
    return jax.tree.map(lambda part: PAGE_AXES if part.ndim == rank else (None,) * part.ndim, pool)


def write_pages(pool: Any, new: Array, layer: Int[Array, ""], slots: Int[Array, " T"]) -> Any:
    """Return the pages of all layers with the new entries of one layer.

    Args:
        pool: Pages [L P G ...].
        new: Entries of new tokens [T ...], in the compute dtype.
        layer: Layer that they are of.
        slots: Slot of each; those outside of the pool are left out.
    """
    size = jnp.int32(pool.shape[2])
    entries = new
    if isinstance(pool, QuantizedArray):
        group = pool.shape[-1] // pool.num_blocks
        entries: Any = quantize(new, pool.dtype_name, axis=-1, block_size=group)
    return jax.tree.map(
        lambda pool_part, new_part: pool_part.at[layer, slots // size, slots % size].set(
            new_part.astype(pool_part.dtype), mode="drop"
        ),
        pool,
        entries,
    )


def attend_pages(
    q: Float[Array, "T N H"],
    pool: Pool,
    layer: Int[Array, ""],
    tables: PageTables,
    positions: Int[Array, " T"],
    rules: AttentionRules,
) -> Any:
    """Return attention of new tokens over the pages of one layer; 0 for padding with "xla".

    It is [T N H], and a pair with the log-sum-exp [T N] where the rules keep it.

    Args:
        q: Queries: one of each of R sequences, then C of each of P sequences.
        pool: Pages that hold the new tokens already.
        layer: Layer that is read.
        tables: Pages of the sequences.
        positions: Positions of the queries.
        rules: Mask and kernel.

    Raises:
        ValueError: The implementation that is asked for cannot run here, or does not take this.
    """
    try:
        return paged_attention(
            q,
            pool,
            layer,
            tables.singles,
            tables.pieces,
            positions,
            window=rules.window,
            chunk=rules.chunk,
            softcap=rules.softcap,
            scale=rules.scale,
            implementation=rules.implementation,
            returns_lse=rules.keeps_lse,
        )
    except ValueError as error:
        if rules.implementation is None:
            raise
        raise ValueError(
            f"execution.kernels.attention={rules.implementation}: {error}: set"
            " execution.kernels.attention to xla"
        ) from error


def empty_pages(shape: tuple[int, ...], form: CacheFormat, dtype: Any, placement: Placement) -> Any:
    """Return an empty pool, cut as the mesh is.

    Args:
        shape: Its shape.
        form: Format of the entries.
        dtype: Dtype of the compute format.
        placement: Layout rules.
    """
    pool = empty_slots(shape, form, dtype)
    return jax.tree.map(lambda part, axes: placement.place(part, axes), pool, page_axes(pool))
