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

    xla           gathers the pages of the tables, then `flash_attention` with positions
    pallas_tpu    JAX's own ragged_paged_attention, which reads the pages where they are

Pages may hold few bits with scales for each token (`sharding/sequence_parallel/cache_formats.py`).
One layer's pages read as [P G 2M H] are the layout that the TPU kernel takes. The pool travels in
the carry of the loop over layers and is written in place (`sharding/sequence_parallel/cached.py`).
Heads are cut over the tensor axis; pages are not cut.

Source of the layout: PagedAttention, arXiv 2309.06180, section 4.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import QuantizedArray, dequantize, quantize
from pallas_kernels.backend import Operation
from sharding import axes as ax
from sharding.constrain import Placement
from sharding.sequence_parallel.cache_formats import CacheFormat, empty_slots
from sharding.sequence_parallel.local_attention import (
    AttentionRules,
    HeldTokens,
    Seen,
    attend_locally,
)

PAGE_AXES = (None, None, None, ax.ACT_KV_HEADS, None, None)
"""Logical axes of a pool."""

Pool = Float[Array, "L P G M 2 H"] | QuantizedArray
"""Pages of keys and values; the scales of few bits have as many dimensions."""

_KEYS_AT_ONCE, _QUERIES_AT_ONCE = 512, 32
"""Tokens of a block of the TPU kernel."""


class PageTables(NamedTuple):
    """Places of the tokens of a step, the same for all layers."""

    slots: Int[Array, " T"]
    """Slot of each new token, page * G + place in it; P * G and more for padding."""
    singles: Int[Array, "R W"]
    """Pages of the sequences with one new token."""
    pieces: Int[Array, "P W"]
    """Pages of the sequences with up to C new tokens; entries that are not used are any page."""


TABLE_AXES = PageTables((None,), (None, None), (None, None))
"""Logical axes of the tables."""


class PagedCache(NamedTuple):
    """Pages of a stack of layers, and the places of the tokens of a step."""

    pool: Pool
    tables: PageTables

    def attend(
        self,
        q: Float[Array, "1 T N H"],
        k: Float[Array, "1 T M H"],
        v: Float[Array, "1 T M H"],
        layer: Int[Array, ""],
        *,
        placement: Placement,
        positions: Int[Array, "1 T"],
        rules: AttentionRules,
    ) -> tuple[Float[Array, "1 T N H"], Seen, PagedCache]:
        """Write new keys and values into pages and attend to the pages of each sequence.

        Args:
            q: Queries of the new tokens.
            k: Keys of the new tokens.
            v: Values of the new tokens.
            layer: Layer of the pool that is written and read.
            placement: Layout rules.
            positions: Positions of the new tokens; -1 for padding.
            rules: Mask and kernel.

        Returns:
            The output, no watched logits, and the pages with the new tokens.

        Raises:
            ValueError: Logits are to be watched.
        """
        if rules.seen:
            raise ValueError(
                "pages serve requests and report no attention logits: set execution.telemetry to"
                " brief"
            )
        heads, kv_heads = (
            (ax.ACT_BATCH, None, axis, None) for axis in (ax.ACT_HEADS, ax.ACT_KV_HEADS)
        )

        pages = page_axes(self.pool)

        def run(q, k, v, pool, layer, tables, positions, *, batch_axes):
            del batch_axes
            pool = write_pages(pool, jnp.stack([k[0], v[0]], axis=2), layer, tables.slots)
            out = attend_pages(q[0], pool, layer, tables, positions[0], rules)
            return out[None], pool

        island = placement.island(
            run,
            in_axes=(heads, kv_heads, kv_heads, pages, (), TABLE_AXES, (ax.ACT_BATCH, None)),
            out_axes=(heads, pages),
        )
        out, pool = island(q, k, v, self.pool, layer, self.tables, positions)
        return out, {}, PagedCache(pool, self.tables)


def page_axes(pool: Any) -> Any:
    """Return the logical axes of each array of a pool; those of latents are not cut."""
    whole = len(PAGE_AXES)
    return jax.tree.map(lambda part: PAGE_AXES if part.ndim == whole else (None,) * part.ndim, pool)


def write_pages(pool: Any, new: Array, layer: Int[Array, ""], slots: Int[Array, " T"]) -> Any:
    """Return the pages of all layers with the new entries of one layer.

    Args:
        pool: Pages [L P G ...].
        new: Entries of new tokens [T ...], in the compute dtype.
        layer: Layer that they are of.
        slots: Slot of each; those outside of the pool are left out.
    """
    size = jnp.int32(pool.shape[2])
    if isinstance(pool, QuantizedArray):
        group = pool.shape[-1] // pool.num_blocks
        new = quantize(new, pool.dtype_name, axis=-1, block_size=group)
    return jax.tree.map(
        lambda held, one: held.at[layer, slots // size, slots % size].set(
            one.astype(held.dtype), mode="drop"
        ),
        pool,
        new,
    )


def attend_pages(
    q: Float[Array, "T N H"],
    pool: Pool,
    layer: Int[Array, ""],
    tables: PageTables,
    positions: Int[Array, " T"],
    rules: AttentionRules,
) -> Float[Array, "T N H"]:
    """Return attention of new tokens over the pages of one layer; 0 for padding with "xla".

    Args:
        q: Queries: one of each of R sequences, then C of each of P sequences.
        pool: Pages that hold the new tokens already.
        layer: Layer that is read.
        tables: Pages of the sequences.
        positions: Positions of the queries.
        rules: Mask and kernel.
    """
    requested = rules.implementation
    if requested is None and why_not_kernel(q, pool) is not None:
        requested = "xla"
    attend = OPERATION.function(requested)
    return attend(q, pool, layer, tables, positions, rules)


def why_not_kernel(q: Float[Array, "T N H"], pool: Pool) -> str | None:
    """Return the limit of JAX's kernel that these sizes break; None if it takes them.

    Args:
        q: Queries of a device.
        pool: Pages of a device.
    """
    if isinstance(pool, QuantizedArray):
        return f"pages of {pool.dtype_name}"
    combined, packing = 2 * pool.shape[3], 4 // pool.dtype.itemsize
    if q.shape[-1] % 128:
        return f"heads of width {q.shape[-1]}, which must be a multiple of 128"
    rows, rest = divmod(combined, packing)
    if rest or (rows not in (1, 2, 4, 8) and rows % 8):
        return f"{pool.shape[3]} key heads on a device, which fill no tile of {pool.dtype}"
    return None


def attend_gathered(
    q: Float[Array, "T N H"],
    pool: Any,
    layer: Int[Array, ""],
    tables: PageTables,
    positions: Int[Array, " T"],
    rules: AttentionRules,
    split: Callable[[Array], tuple[Array, Array]],
) -> Float[Array, "T N Hv"]:
    """Gather the pages of each sequence, and attend to them as to a row.

    Args:
        q: Queries, as for `attend_pages`.
        pool: Pages [L P G ...] that hold the new tokens already.
        layer: Layer that is read.
        tables: Pages of the sequences.
        positions: Positions of the queries.
        rules: Mask and kernel.
        split: Function of the entries of some rows [B U ...] to keys and values [B U M H].
    """
    pages, size = pool.shape[1:3]

    def part(q: Array, table: Array, positions: Array) -> Array:
        rows, width = table.shape

        def gather(array: Array) -> Array:
            # From all layers at once: taking the layer first would copy its pages.
            flat = array.reshape(-1, *array.shape[2:])
            held = flat.at[layer * jnp.int32(pages) + table].get(mode="clip")
            return held.reshape(rows, width * size, *array.shape[3:])

        held = jax.tree.map(gather, pool)
        is_few = isinstance(held, QuantizedArray)
        k, v = split(dequantize(held, q.dtype) if is_few else held.astype(q.dtype))
        keys = HeldTokens(jnp.arange(width * size, dtype=jnp.int32), None)
        queries = q.reshape(rows, -1, *q.shape[1:])
        given = HeldTokens(positions.reshape(rows, -1), None), keys
        out, _ = attend_locally(queries, k, v, *given, rules)
        return out.reshape(*q.shape[:2], -1)

    count = tables.singles.shape[0]
    parts = []
    if count:
        parts.append(part(q[:count], tables.singles, positions[:count]))
    if tables.pieces.shape[0]:
        parts.append(part(q[count:], tables.pieces, positions[count:]))
    return jnp.concatenate(parts)


def _gathered(*given: Any) -> Array:
    """Attend to keys and values that alternate."""
    return attend_gathered(*given, lambda held: (held[..., 0, :], held[..., 1, :]))


def _in_kernel(
    q: Array,
    kv: Array,
    layer: Array,
    tables: PageTables,
    positions: Array,
    rules: AttentionRules,
) -> Array:
    """Call JAX's kernel; the rest of a piece that is not full computes numbers that are not read.

    Raises:
        ValueError: The sizes break a limit of the kernel.
    """
    if (limit := why_not_kernel(q, kv)) is not None:
        raise ValueError(
            f"execution.kernels.attention=pallas_tpu: JAX's kernel for pages does not take {limit}:"
            " set execution.kernels.attention to xla"
        )
    from jax.experimental.pallas.ops.tpu import ragged_paged_attention as jax_kernel  # noqa: PLC0415

    layers, pages, size, heads, _, width = kv.shape
    flat = kv.reshape(layers * pages, size, 2 * heads, width)
    table = jnp.concatenate([tables.singles, tables.pieces])
    singles, pieces = tables.singles.shape[0], tables.pieces.shape[0]
    length = (q.shape[0] - singles) // max(pieces, 1)
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
        sm_scale=rules.scale or q.shape[-1] ** -0.5,
        sliding_window=rules.window,
        soft_cap=rules.softcap,
        # The kernel's own table of sizes asks the device of this process, which may be another.
        num_kv_pages_per_block=min(table.shape[1], max(_KEYS_AT_ONCE // size, 1)),
        num_queries_per_block=min(q.shape[0], _QUERIES_AT_ONCE),
    )


OPERATION = Operation(
    name="paged_attention", implementations={"xla": _gathered, "pallas_tpu": _in_kernel}
)
"""Implementations of attention over pages."""


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
