# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Implements quantized_matmul for Hopper with a widened w: W8A16, W4A16, float8 weights, few rows.

    out^T [n m] = sum over sections of (w^T [n k] @ x^T [k m]) * w scales [n] * x scales [m]

With few rows the time is that of reading w, so w is read once, without a transpose: [k n], in 8 or
4 bits. Columns of w take the 64 rows of WGMMA, and rows of x its columns, as few as 8: nothing is
computed and discarded. A program has two warpgroups that compute and one that loads:

    loads      slots of w, of x, and of the scales of their blocks, by TMA
    compute    each its own columns: a step of w from the slot into registers, widened there to the
               dtype of x, and written back transposed as WGMMA reads it; all of it while the
               product of the step before is under way

int4 is packed two to a byte along n, as XLA packs it, and is unpacked in registers. Integers of an
x in few bits are exact in bfloat16, and their sums are moved to int32 before float32 would round
one: the result is that of integers. Where scales vary in blocks, the sum of a block is scaled in
float32 and added in registers, which then hold fewer rows.

Where n is small, programs share the sum over k; XLA adds their parts, as it scales channels and
transposes the result: 4 bytes times rows times columns for each of them.

Sizes of n that are no multiple of 128, and of k no multiple of 64, are padded with zeros, which
copies w. It runs on Hopper only; on the CPU interpreted (`interpret=InterpretGPUParams()`). Tile
sizes are in tiles.py.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.array_types import Array
from pallas_kernels.gpu.hopper_parts import (
    COMPUTING,
    REGISTERS_COMPUTING,
    REGISTERS_LOADING,
    Registers,
    Ring,
    along,
    call,
    shared_memory,
)
from pallas_kernels.jax_versions import mosaic_gpu as plgpu
from pallas_kernels.jax_versions import store_in_global, transposed_ref
from pallas_kernels.quantized_matmul.gpu.scales import Scaled, fill_tiles, pad
from pallas_kernels.quantized_matmul.gpu.tiles import STEP, QuantizedTiles, tiles_widened


def _widened_kernel(*refs, tiles, is_given, sections, sums, registers):
    names = ("x", "w", "x_scales", "w_scales", "out")
    present = [name for name in names if is_given.get(name, True)]
    at = dict(zip(present, refs, strict=False))
    x_smem, w_smem, wide, x_scale_smem, w_scale_smem, full, free = refs[len(present) :]
    ring = Ring(stages=tiles.stages, full=full, free=free)
    warpgroup = jax.lax.axis_index("warpgroup")
    column, row, split = (jax.lax.axis_index(name) for name in ("n", "m", "split"))
    rows = pl.ds(row * tiles.rows, tiles.rows)
    shape = (tiles.columns, tiles.rows)
    first = split * sections
    last = jnp.minimum(first + sections, at["w"].shape[0] // (STEP * tiles.section))
    steps = (last - first) * tiles.section

    def columns(warpgroup: Any) -> Any:
        start = (column * COMPUTING + warpgroup) * tiles.columns
        return pl.ds(start, tiles.columns)

    @pl.when(warpgroup < COMPUTING)
    def _compute():
        plgpu.set_max_registers(REGISTERS_COMPUTING, action="increase")
        own_wide = wide.at[warpgroup]

        def buffer(step: Any) -> Any:
            return own_wide.at[jax.lax.rem(step, jnp.int32(2))]

        def widen(step: Any) -> None:
            slot = ring.await_full(step)
            few_bits = w_smem.at[slot, warpgroup]
            buffer(step)[...] = registers.widen(few_bits, x_smem.dtype)
            plgpu.commit_smem()

        def add(step: Any, total: Array, *, is_last: bool) -> Array:
            slot = jax.lax.rem(step, jnp.int32(tiles.stages))
            started = None if is_last else lambda: widen(step + 1)
            return _add_turned(total, buffer(step), x_smem.at[slot], registers, started)

        def release(step: Any) -> None:
            has_loaded = bool(x_scale_smem is not None or w_scale_smem is not None)
            slot = jax.lax.rem(step, jnp.int32(tiles.stages))
            registers.free(free.at[slot], has_loaded=has_loaded)

        def scale(step: Any, total: Array) -> Array:
            slot = jax.lax.rem(step, jnp.int32(tiles.stages))
            if w_scale_smem is not None:
                scales = registers.load(w_scale_smem.at[slot, warpgroup], 0)
                total = total * along(scales, shape, 0)
            if x_scale_smem is not None:
                scales = x_scale_smem.at[slot, pl.ds(0, tiles.rows)]
                total = total * along(registers.load(scales, 1), shape, 1)
            return total

        zeros = registers.constant(shape, 0.0)
        # Where a section is a step of one long sum, the tensor cores keep adding to it.
        is_moved = (
            sums == jnp.int32
            or tiles.section > 1
            or any(ref is not None for ref in (x_scale_smem, w_scale_smem))
        )

        def through(start: Any, total: Array, *, is_last: bool) -> Array:
            """Run a section, widening what follows it on the way."""
            inner = zeros if is_moved else total

            def step(i: Any, inner: Array) -> Array:
                inner = add(start + i, inner, is_last=False)
                release(start + i)
                return inner

            count = tiles.section - 1
            if count > 3:
                inner = jax.lax.fori_loop(0, count, step, inner)
            else:
                for i in range(count):
                    inner = step(i, inner)
            end = start + count
            inner = add(end, inner, is_last=is_last)
            if is_moved:
                total = total + scale(end, inner).astype(sums)
            release(end)
            return total if is_moved else inner

        widen(jnp.int32(0))
        total = zeros.astype(sums)
        total = jax.lax.fori_loop(
            0,
            last - first - 1,
            lambda i, total: through(i * tiles.section, total, is_last=False),
            total,
        )
        total = through(steps - tiles.section, total, is_last=True)
        store_in_global(at["out"].at[split, columns(warpgroup), rows], total)

    @pl.when(warpgroup == COMPUTING)
    def _load():
        plgpu.set_max_registers(REGISTERS_LOADING, action="decrease")

        @pl.loop(0, steps)
        def _step(step: Array) -> None:
            slot = ring.acquire(step)
            section = first + jax.lax.div(step, jnp.int32(tiles.section))
            part = pl.ds((first * tiles.section + step) * STEP, STEP)
            arrives = full.at[slot]
            for i in range(COMPUTING):
                source = at["w"].at[part, columns(i)]
                plgpu.copy_gmem_to_smem(source, w_smem.at[slot, i], arrives)
                if w_scale_smem is not None:
                    source = at["w_scales"].at[section, columns(i)]
                    plgpu.copy_gmem_to_smem(source, w_scale_smem.at[slot, i], arrives)
            plgpu.copy_gmem_to_smem(at["x"].at[rows, part], x_smem.at[slot], arrives)
            if x_scale_smem is not None:
                source = at["x_scales"].at[section, pl.ds(row * tiles.rows, x_scale_smem.shape[1])]
                plgpu.copy_gmem_to_smem(source, x_scale_smem.at[slot], arrives)

        ring.drain(steps)


def _add_turned(
    total: Array, lhs: Any, rhs: Any, registers: Registers, started: Callable[[], None] | None
) -> Array:
    """Return total + left^T @ right^T, of matrices in shared memory.

    `started()` runs while the product does.
    """

    def multiply(sums: Any) -> None:
        plgpu.wgmma(sums, transposed_ref(lhs), transposed_ref(rhs))
        if started is not None:
            started()

    if registers.is_interpreted:
        if started is not None:
            started()
        product = jax.lax.dot_general(
            lhs[...], rhs[...], (((0,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )
        return total + product
    return pl.run_state(multiply)(plgpu.ACC.init(total))


def _bits(dtype: Any) -> int:
    return 4 if dtype == jnp.int4 else 8


def multiply(factors: Scaled, *, exact: int | None, out_dtype: Any, interpret: Any = None) -> Array:
    """Return x @ w of a floating or quantised x and a quantised w.

    Args:
        factors: Factors of the product.
        exact: Products of integers that float32 may sum; None where there are none.
        out_dtype: Dtype of the result.
        interpret: Interpreter for the CPU.
    """
    m = factors.x.shape[0]
    n = factors.w.shape[1]
    factors = fill_tiles(factors, k=STEP, n=128)
    wide_k, wide_n = factors.w.shape
    bits = _bits(factors.w.dtype)
    tiles = tiles_widened(m, wide_n, wide_k, bits, factors.block, exact)
    factors = fill_tiles(factors, m=tiles.rows)
    dtype = factors.x.dtype if factors.is_floating else jnp.dtype(jnp.bfloat16)
    x = factors.x.astype(dtype)
    is_counted = exact is not None and factors.block is None
    sums = jnp.int32 if is_counted else jnp.float32
    parts = _call(x, factors, tiles, sums, bits, interpret)
    out = parts.sum(0, dtype=sums).T[:m, :n].astype(jnp.float32)
    return factors.finish(out).astype(out_dtype)


def _call(
    x: Array, factors: Scaled, tiles: QuantizedTiles, sums: Any, bits: int, interpret: Any
) -> Array:
    (rows, k), n = x.shape, factors.w.shape[1]
    stages = tiles.stages
    columns = tiles.columns
    # TMA copies at least 128 bytes here.
    more = -tiles.rows % 32
    x_blocks = factors.x_blocks if factors.x_blocks is None else pad(factors.x_blocks, 0, more)
    tables = {"x_scales": x_blocks, "w_scales": factors.w_blocks}
    arrays = (x, factors.w, *(table for table in tables.values() if table is not None))
    sections = k // STEP // tiles.section
    few_bits = plgpu.SMEM(
        (stages, COMPUTING, STEP, columns),
        factors.w.dtype,
        transforms=(
            plgpu.TilingTransform((8, columns)),
            plgpu.SwizzleTransform(columns * bits // 8),
        ),
    )
    has_x, has_w = (table is not None for table in tables.values())
    copies = 1 + COMPUTING + has_x + COMPUTING * has_w
    (parts,) = call(
        functools.partial(
            _widened_kernel,
            tiles=tiles,
            is_given={name: table is not None for name, table in tables.items()},
            sections=-(-sections // tiles.splits),
            sums=sums,
            registers=Registers(is_interpreted=interpret is not None),
        ),
        arrays,
        (jax.ShapeDtypeStruct((tiles.splits, n, rows), sums),),
        (
            shared_memory((stages, tiles.rows, STEP), x.dtype),
            few_bits,
            shared_memory((COMPUTING, 2, STEP, columns), x.dtype),
            plgpu.SMEM((stages, tiles.rows + more), jnp.float32) if has_x else None,
            plgpu.SMEM((stages, COMPUTING, columns), jnp.float32) if has_w else None,
            plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
            plgpu.Barrier(num_arrivals=COMPUTING, num_barriers=stages),
        ),
        (n // (COMPUTING * columns), rows // tiles.rows, tiles.splits),
        ("n", "m", "split"),
        interpret,
    )
    return parts
