# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Implements flash_attention for TPUs: the Mosaic kernel of the forward pass, and `KERNELS`.

The grid is (sequence, key head, block of rows, step). A step meets one block of keys: the running
softmax of the rows stays in VMEM over the steps, and the next keys are copied meanwhile. blocks.py
has rows, blocks and hidden tiles; tiles.py the arithmetic; backward.py the backward pass.

Steps beyond a block's range (nearly half of them with causality and positions from 0) cost their
bookkeeping, but no copy and no arithmetic. Heads whose width is no multiple of 128 fill their lanes
partly. Call it on local arrays, in a `jax.shard_map`: an array sharded by the compiler is gathered
first.

On the CPU it runs in TPU interpret mode only (`pallas_kernels.interpreter.interpret_kernels`).
"""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.array_types import Array, Float
from pallas_kernels.flash_attention.kernels import AttentionOperands, Kernels
from pallas_kernels.flash_attention.mask import Rules
from pallas_kernels.flash_attention.tpu import tiles
from pallas_kernels.flash_attention.tpu.backward import differentiate
from pallas_kernels.flash_attention.tpu.blocks import TileSizes, make_plan
from pallas_kernels.flash_attention.tpu.grid import Grid, mask, when_seen
from pallas_kernels.flash_attention.tpu.tiles import LANES, RunningSoftmax
from pallas_kernels.jax_versions import match_varying, shape_varying_like


def attend(
    operands: AttentionOperands, *, pallas_call: Callable[..., Any] = pl.pallas_call
) -> tuple[Float[Array, "B S N Hv"], Float[Array, "B N S"]]:
    """Return what `pallas_kernels.flash_attention` returns.

    `pallas_call` is replaced by kernels that also send (ring/remote_dma/blocks.py).
    """
    q, k, v, tokens, rules = operands
    sizes = TileSizes.of(q, k, v, rules)
    plan = make_plan(sizes, tokens, rules)
    grid = Grid.of(sizes, plan, by="rows")
    arrays = (sizes.to_rows(q), sizes.to_keys(k), sizes.to_keys(v))
    marks = (plan.row_marks, plan.key_marks)
    call = pallas_call(
        functools.partial(_attend_kernel, grid=grid, rules=rules),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=grid.shape,
            in_specs=[
                grid.rows(sizes.h),
                grid.keys(sizes.h),
                grid.keys(sizes.hv),
                grid.row_marks(),
                grid.key_marks(),
            ],
            out_specs=[grid.rows(sizes.hv), grid.statistics()],
            scratch_shapes=[
                pltpu.VMEM((plan.num_marks, sizes.row_block, LANES), jnp.int32),
                pltpu.VMEM((sizes.row_block, LANES), jnp.float32),
                pltpu.VMEM((sizes.row_block, LANES), jnp.float32),
                pltpu.VMEM((sizes.row_block, sizes.hv), jnp.float32),
            ],
        ),
        out_shape=[
            shape_varying_like((sizes.b, sizes.m, sizes.rows, sizes.hv), q.dtype, q, k, v),
            shape_varying_like(sizes.statistics, jnp.float32, q, k, v),
        ],
        compiler_params=grid.compiler_params,
        cost_estimate=grid.cost(products=2, itemsize=q.dtype.itemsize),
        name="flash_attention",
    )
    inputs = (plan.row_bounds, plan.key_bounds, *arrays, *marks)
    out, lse = call(*match_varying(inputs, q, k, v))
    return sizes.from_rows(out), sizes.from_statistics(lse)


def _attend_kernel(*refs: Any, grid: Grid, rules: Rules) -> None:
    *bounds, q, k, v, row_marks, key_marks, out, lse, columns, top, total, sums = refs

    def keep(state: RunningSoftmax) -> None:
        top[...] = jnp.broadcast_to(state.top, top.shape)
        total[...] = jnp.broadcast_to(state.total, total.shape)
        sums[...] = state.sums

    def state() -> RunningSoftmax:
        return RunningSoftmax(top[:, :1], total[:, :1], sums[...])

    @pl.when(grid.is_first)
    def _():
        grid.keep_columns(columns, row_marks)
        keep(tiles.nothing_seen(*sums.shape))

    @functools.partial(when_seen, grid, rules, *bounds)
    def _(key_block: Any):
        is_visible = mask(grid, rules, columns, key_marks, key_block)
        keep(tiles.attend_tile(state(), q[...], k[...], v[...], is_visible, rules))

    @pl.when(grid.is_last)
    def _():
        result, statistic = tiles.finish(state())
        out[...] = result.astype(out.dtype)
        lse[...] = tiles.row(statistic)


KERNELS = Kernels(attend, differentiate)
