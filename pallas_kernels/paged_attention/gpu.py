# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Implements paged_attention in Triton, for any NVIDIA GPU with tensor cores.

    attend   a block of queries of one key head of one sequence, all its query heads together as the
             rows of a tile, against its share of the keys, whose pages it looks up in the table
    merge    one query of one head: the shares, weighted by their log-sum-exp

Keys are shared out (split-K, Flash-Decoding) where there are too few blocks of queries to fill the
GPU, evenly over the blocks of keys that a sequence really has, so that short ones cost little.
What is before every window or after the last position is not read. Exponentials are to base 2.

Pages of 8 bits are read as they are: the products are taken for each group of features that shares
a scale, and scaled then. Products of float32 are exact float32 products, not TF32.

It does not run on TPUs, and on the CPU only interpreted (`interpret=True`). JAX 0.11 deprecates
Pallas through Triton, and warns once per program.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.array_types import Array, Float, Int
from pallas_kernels.gpu.choice import reason_against_this_gpu
from pallas_kernels.gpu.triton_parts import capped_logits, dot
from pallas_kernels.jax_versions import shape_varying_like
from pallas_kernels.paged_attention.arguments import PagedRules, Pool, Tables
from pallas_kernels.quantized_array import QuantizedArray

WIDEST = 256
"""Largest head width."""

_PROGRAMS = 512
"""Programs that fill a GPU; keys are split where there are fewer. An H100 has 132 processors."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _PagedTiles:
    """Rows of the tile of queries, and of each tile of keys; and how Triton compiles them."""

    queries: int
    keys: int
    warps: int = 4
    stages: int = 2


def _tiles(rows: int, width: int, itemsize: int) -> _PagedTiles:
    """Return tiles that fit the 99 KiB of the smaller GPUs.

    Args:
        rows: Queries of a key head of a sequence.
        width: Width of a head.
        itemsize: Bytes of an element of the queries.
    """
    bytes_of_row = pl.next_power_of_2(width) * itemsize
    # Exact float32 products use no tensor core and are unrolled: only small tiles compile.
    most = 16 if itemsize == 4 else 64 if bytes_of_row <= 256 else 32
    keys = 64 if bytes_of_row <= 256 else 32 if bytes_of_row <= 512 else 16
    return _PagedTiles(queries=min(max(pl.next_power_of_2(rows), 16), most), keys=keys)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _PagedSizes:
    """Sizes of a call, and how it is cut."""

    rows: int
    """Sequences."""
    length: int
    """Queries of a sequence."""
    heads: int
    """Query heads."""
    group: int
    """Query heads of a key head."""
    width: int
    """Width of a head."""
    table: int
    """Pages of a table."""
    pages: int
    """Pages of a layer."""
    page: int
    """Positions of a page."""
    parts: int
    """Parts of a head with a scale of their own; 1 where there are no scales."""
    splits: int
    """Shares of the keys."""
    tiles: _PagedTiles

    @property
    def slots(self) -> int:
        """Positions of a table."""
        return self.table * self.page

    @property
    def blocks(self) -> int:
        """Tiles of queries of a key head of a sequence."""
        return pl.cdiv(self.length * self.group, self.tiles.queries)


def reason_against(*arrays: Any) -> str | None:
    """Return why the kernel does not take these arrays; None if it does.

    Args:
        *arrays: Queries [T N H] and pages [L P G M 2 H] of a device; or nothing.
    """
    if not arrays:
        return None
    q, pool = arrays
    if q.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"queries in {jnp.dtype(q.dtype).name}"
    if q.shape[-1] > WIDEST:
        return f"heads {q.shape[-1]} wide, which are wider than {WIDEST}"
    if not isinstance(pool, QuantizedArray):
        is_read = jnp.issubdtype(pool.dtype, jnp.floating) and pool.dtype.itemsize in (2, 4)
        return None if is_read else f"pages in {jnp.dtype(pool.dtype).name}"
    if pool.dtype_name != "int8":
        return f"pages of {pool.dtype_name}"
    if 2**31 <= pool.values.size <= 2**32:  # Pallas counts bytes, and would take offsets of 32 bits
        return "pages of int8 between 2 and 4 GiB"
    return None


def reason_against_default(*arrays: Any) -> str | None:
    """Return why XLA runs by default; None if the kernel does.

    Args:
        *arrays: As for `reason_against`.
    """
    return reason_against_this_gpu() or reason_against(*arrays)


def paged_attention(
    q: Float[Array, "T N H"],
    pool: Pool,
    layer: Int[Array, ""],
    tables: Tables,
    positions: Int[Array, " T"],
    rules: PagedRules,
    *,
    interpret: bool = False,
) -> Float[Array, "T N H"]:
    """Return what `pallas_kernels.paged_attention` returns.

    Raises:
        ValueError: The kernel does not run on this GPU, or does not take these arrays.
    """
    limit = reason_against(q, pool) if interpret else reason_against_default(q, pool)
    if limit is not None:
        raise ValueError(
            f"paged_attention: implementation='pallas_gpu' does not run for this: {limit}: "
            "choose 'xla'"
        )
    count = tables.singles.shape[0]
    operands = (
        (tables.singles, q[:count], positions[:count]),
        (
            tables.pieces,
            q[count:],
            positions[count:],
        ),
    )
    parts = [
        _attend(queries, pool, layer, table, where, rules, interpret)
        for table, queries, where in operands
        if table.shape[0]
    ]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def _sizes(q: Array, pool: Any, table: Array) -> _PagedSizes:
    (rows, width), group = table.shape, q.shape[1] // pool.shape[3]
    length = q.shape[0] // rows
    page = pool.shape[2]
    tiles = _tiles(length * group, q.shape[2], q.dtype.itemsize)
    programs = rows * pool.shape[3] * pl.cdiv(length * group, tiles.queries)
    # A power of two, of which each has a tile of keys at least when the table is full.
    most = min(pl.cdiv(_PROGRAMS, programs), pl.cdiv(width * page, tiles.keys))
    return _PagedSizes(
        rows=rows,
        length=length,
        heads=q.shape[1],
        group=group,
        width=q.shape[2],
        table=width,
        pages=pool.shape[1],
        page=page,
        parts=pool.num_blocks if isinstance(pool, QuantizedArray) else 1,
        splits=1 << (most.bit_length() - 1),
        tiles=tiles,
    )


def _own_queries(sizes: _PagedSizes) -> tuple[Array, Array, Array]:
    """Return the tokens and heads of the rows of a program's tile, and which of them there are."""
    block = pl.program_id(2) // sizes.splits if sizes.splits > 1 else pl.program_id(2)
    row = block * sizes.tiles.queries + jnp.arange(sizes.tiles.queries, dtype=jnp.int32)
    token = pl.program_id(1) * sizes.length + jax.lax.div(row, jnp.int32(sizes.group))
    head = pl.program_id(0) * sizes.group + jax.lax.rem(row, jnp.int32(sizes.group))
    return token, head, row < sizes.length * sizes.group


def _own_blocks(positions: Array, rules: PagedRules, sizes: _PagedSizes) -> tuple[Array, ...]:
    """Return a program's first tile of keys, and last + 1; and the keys that a query sees."""
    keys = jnp.int32(sizes.tiles.keys)
    splits = jnp.int32(sizes.splits)
    end = jnp.minimum(jnp.max(positions) + 1, sizes.slots)
    high = jax.lax.div(end + keys - 1, keys)
    first = low = jnp.int32(0)
    if rules.window is not None:
        first = jnp.min(jnp.where(positions >= 0, positions, sizes.slots)) - (rules.window - 1)
        first = jnp.maximum(first, 0)
        low = jnp.minimum(jax.lax.div(first, keys), high)
    if sizes.splits == 1:
        return low, high, first, end
    share = jax.lax.div(high - low + splits - 1, splits)
    begin = low + jax.lax.rem(pl.program_id(2), splits) * share
    return begin, jnp.minimum(begin + share, high), first, end


def _attend_kernel(
    q_ref, positions_ref, table_ref, layer_ref, values_ref, scales_ref, *out_refs, rules, sizes
):
    tiles = sizes.tiles
    width = sizes.width // sizes.parts
    key_head, sequence = pl.program_id(0), pl.program_id(1)  # the interpreter has none in a loop
    token, head, is_row = _own_queries(sizes)
    positions = plgpu.load(positions_ref.at[token], mask=is_row, other=-1)
    begin, end, first, length = _own_blocks(positions, rules, sizes)
    feature = jnp.arange(pl.next_power_of_2(width), dtype=jnp.int32)

    def columns(part: int, is_read: Array) -> tuple[Array, Array]:
        """Return the features of a part of a head [1 h], and what is read of it [rows h]."""
        is_feature = jnp.broadcast_to((feature < width)[None, :], (is_read.size, feature.size))
        return (part * width + feature)[None, :], is_read[:, None] & is_feature

    def queries(part: int) -> Array:
        column, mask = columns(part, is_row)
        return plgpu.load(q_ref.at[token[:, None], head[:, None], column], mask=mask, other=0)

    parts = range(sizes.parts)
    q = [queries(part) for part in parts]

    def step(block: Array, carry: Any) -> Any:
        out, top, total = carry
        key = block * tiles.keys + jnp.arange(tiles.keys, dtype=jnp.int32)
        is_key = key < length if rules.window is None else (key >= first) & (key < length)
        place = jax.lax.div(key, jnp.int32(sizes.page))
        page = plgpu.load(table_ref.at[sequence, place], mask=is_key, other=0)
        slot = (layer_ref[0] * sizes.pages + page) * sizes.page + key - place * sizes.page

        def held(part: int, which: int) -> Array:
            column, mask = columns(part, is_key)
            where = values_ref.at[slot[:, None], key_head, which, column]
            return plgpu.load(where, mask=mask, other=0).astype(q_ref.dtype)

        def scale(x: Array, part: int, which: int) -> Array:
            if scales_ref is None:
                return x
            where = scales_ref.at[slot, key_head, which, part]
            return x * plgpu.load(where, mask=is_key, other=0.0)[None, :]

        products = jnp.zeros((tiles.queries, tiles.keys), jnp.float32)
        for part in parts:
            products += scale(dot(q[part], held(part, 0), 1, 1), part, 0)
        distance = positions[:, None] - key[None, :]
        sees = (distance >= 0) & is_key[None, :]
        if rules.window is not None:
            sees &= distance < rules.window
        logits = jnp.where(sees, capped_logits(products, rules), -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(logits, axis=1))
        # Rows that have seen no key: logits are -inf, and so must the result be.
        base = jnp.where(new_top == -jnp.inf, 0.0, new_top)
        weights = jnp.exp2(logits - base[:, None])
        shrink = jnp.exp2(top - base)
        out = tuple(
            out[part] * shrink[:, None]
            + dot(scale(weights, part, 1).astype(q_ref.dtype), held(part, 1), 1, 0)
            for part in parts
        )
        return out, new_top, total * shrink + jnp.sum(weights, axis=1)

    start = (
        tuple(jnp.zeros((tiles.queries, feature.size), jnp.float32) for _ in parts),
        jnp.full((tiles.queries,), -jnp.inf, jnp.float32),
        jnp.zeros((tiles.queries,), jnp.float32),
    )
    out, top, total = jax.lax.fori_loop(begin, end, step, start)
    total_or_1 = jnp.where(total > 0, total, 1.0)
    out_ref = out_refs[0]
    split = ()
    if sizes.splits > 1:
        split = (jax.lax.rem(pl.program_id(2), jnp.int32(sizes.splits)),)
        lse = jnp.where(total > 0, top + jnp.log2(total_or_1), -jnp.inf)
        plgpu.store(out_refs[1].at[(*split, token, head)], lse, mask=is_row)
    for part in parts:
        column, mask = columns(part, is_row)
        where = out_ref.at[(*split, token[:, None], head[:, None], column)]
        plgpu.store(where, (out[part] / total_or_1[:, None]).astype(out_ref.dtype), mask=mask)


def _merge_kernel(parts_ref, lse_ref, out_ref, *, sizes):
    token = pl.program_id(0)
    head = pl.program_id(1)
    split = jnp.arange(sizes.splits, dtype=jnp.int32)
    feature = jnp.arange(pl.next_power_of_2(sizes.width), dtype=jnp.int32)
    lse = lse_ref[split, token, head]
    top = jnp.max(lse)
    weights = jnp.exp2(lse - jnp.where(top == -jnp.inf, 0.0, top))
    total = jnp.sum(weights)
    is_feature = jnp.broadcast_to((feature < sizes.width)[None, :], (split.size, feature.size))
    where = parts_ref.at[split[:, None], token, head, feature[None, :]]
    parts = plgpu.load(where, mask=is_feature, other=0.0)
    out = jnp.sum(parts * weights[:, None], axis=0) / jnp.where(total > 0, total, 1.0)
    where = out_ref.at[token, head, feature]
    plgpu.store(where, out.astype(out_ref.dtype), mask=feature < sizes.width)


def _attend(
    q: Array,
    pool: Any,
    layer: Array,
    table: Array,
    positions: Array,
    rules: PagedRules,
    interpret: bool,
) -> Array:
    """Return attention of sequences with equally many queries."""
    sizes = _sizes(q, pool, table)
    like = (q, pool, table)
    is_few = isinstance(pool, QuantizedArray)
    values, scales = (pool.values, pool.scales) if is_few else (pool, None)

    def flat(array: Array) -> Array:
        return array.reshape(-1, *array.shape[3:])

    shapes = [shape_varying_like(q.shape, q.dtype, *like)]
    if sizes.splits > 1:
        shape = (sizes.splits, *q.shape)
        shapes = [shape_varying_like(s, jnp.float32, *like) for s in (shape, shape[:-1])]
    results = pl.pallas_call(
        functools.partial(_attend_kernel, rules=rules, sizes=sizes),
        grid=(sizes.heads // sizes.group, sizes.rows, sizes.blocks * sizes.splits),
        out_shape=shapes,
        compiler_params=plgpu.CompilerParams(
            num_warps=sizes.tiles.warps, num_stages=sizes.tiles.stages
        ),
        interpret=interpret,
        name="paged_attention",
    )(
        q,
        positions.astype(jnp.int32),
        table.astype(jnp.int32),
        layer.astype(jnp.int32).reshape(1),
        flat(values),
        None if scales is None else flat(scales),
    )
    if sizes.splits == 1:
        return results[0]
    return pl.pallas_call(
        functools.partial(_merge_kernel, sizes=sizes),
        grid=q.shape[:2],
        out_shape=shape_varying_like(q.shape, q.dtype, *like),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="paged_attention_merge",
    )(*results)
