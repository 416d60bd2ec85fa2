# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Implements the backward pass of flash_attention for TPUs: a kernel for dQ, one for dK and dV.

    dQ       by rows, over their keys:   P, dS as [r u], dQ += dS K
    dK, dV   by keys, over their rows:   P, dS as [u r], dV += P dO, dK += dS Q

Seven products instead of the five of a single kernel, in return for sums that stay in VMEM and are
written once. No product needs a transpose. Sums and results are float32.

`lse` and `delta` may be those of a softmax over more keys than these: see kernels.py.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.array_types import Array
from pallas_kernels.flash_attention.kernels import AttentionOperands, OutGradient
from pallas_kernels.flash_attention.mask import Rules
from pallas_kernels.flash_attention.tpu import tiles
from pallas_kernels.flash_attention.tpu.blocks import TileSizes, make_plan
from pallas_kernels.flash_attention.tpu.grid import Grid, mask, when_seen
from pallas_kernels.flash_attention.tpu.tiles import LANES
from pallas_kernels.jax_versions import match_varying, shape_varying_like


def differentiate(
    operands: AttentionOperands,
    gradient: OutGradient,
    *,
    pallas_call: Callable[..., Any] = pl.pallas_call,
) -> tuple[Array, Array, Array]:
    """Return the gradients defined in `pallas_kernels.flash_attention.kernels`.

    `pallas_call` is replaced by kernels that also send (ring/remote_dma/blocks.py).
    """
    q, k, v, tokens, rules = operands
    d_out, lse, delta = gradient
    sizes = TileSizes.of(q, k, v, rules)
    plan = make_plan(sizes, tokens, rules)
    # Weights are 0 where a query sees no key; -inf would turn them into NaN.
    lse = jnp.where(jnp.isfinite(lse), lse, 0.0)
    lse = sizes.to_statistics(lse)
    delta = sizes.to_statistics(delta)
    arrays = (
        plan.row_bounds,
        plan.key_bounds,
        sizes.to_rows(q),
        sizes.to_keys(k),
        sizes.to_keys(v),
        sizes.to_rows(d_out),
        lse,
        delta,
        plan.row_marks,
        plan.key_marks,
    )
    like = (q, k, v, d_out, lse, delta)
    arrays = match_varying(arrays, like)

    def call(kernel: Any, grid: Grid, outs: list[Any], scratch: list[Any], products: int) -> Any:
        specs, shapes = zip(*outs, strict=True)
        return pallas_call(
            functools.partial(kernel, grid=grid, rules=rules),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=2,
                grid=grid.shape,
                in_specs=[
                    grid.rows(sizes.h),
                    grid.keys(sizes.h),
                    grid.keys(sizes.hv),
                    grid.rows(sizes.hv),
                    grid.statistics(),
                    grid.statistics(),
                    grid.row_marks(),
                    grid.key_marks(),
                ],
                out_specs=list(specs),
                scratch_shapes=scratch,
            ),
            out_shape=[
                shape_varying_like((sizes.b, sizes.m, *shape), jnp.float32, *like)
                for shape in shapes
            ],
            compiler_params=grid.compiler_params,
            cost_estimate=grid.cost(products, q.dtype.itemsize),
            name=f"flash_attention{kernel.__name__.removesuffix('_kernel')}",
        )(*arrays)

    by_rows = Grid.of(sizes, plan, by="rows")
    (d_q,) = call(
        _d_queries_kernel,
        by_rows,
        [(by_rows.rows(sizes.h), (sizes.rows, sizes.h))],
        [
            pltpu.VMEM((plan.num_marks, sizes.row_block, LANES), jnp.int32),
            pltpu.VMEM((2, sizes.row_block, LANES), jnp.float32),
        ],
        3,
    )
    by_keys = Grid.of(sizes, plan, by="keys")
    d_k, d_v = call(
        _d_keys_kernel,
        by_keys,
        [
            (by_keys.keys(sizes.h), (sizes.keys, sizes.h)),
            (by_keys.keys(sizes.hv), (sizes.keys, sizes.hv)),
        ],
        [pltpu.VMEM((plan.num_marks, sizes.key_block, LANES), jnp.int32)],
        4,
    )
    return sizes.from_rows(d_q), sizes.from_keys(d_k), sizes.from_keys(d_v)


def _d_queries_kernel(*refs: Any, grid: Grid, rules: Rules) -> None:
    *bounds, q, k, v, d_out, lse, delta, row_marks, key_marks, d_q, columns, statistics = refs

    @pl.when(grid.is_first)
    def _():
        grid.keep_columns(columns, row_marks)
        statistics[0] = tiles.column(lse[...])
        statistics[1] = tiles.column(delta[...])
        d_q[...] = jnp.zeros(d_q.shape, jnp.float32)

    @functools.partial(when_seen, grid, rules, *bounds)
    def _(key_block: Any):
        is_visible = mask(grid, rules, columns, key_marks, key_block)
        _, d_scores = tiles.differentiate_tile(
            (q[...], d_out[...]),
            (k[...], v[...]),
            statistics[0][:, :1],
            statistics[1][:, :1],
            is_visible,
            rules,
        )
        d_q[...] += tiles.dot(d_scores.astype(k.dtype), k[...], ((1,), (0,)))

    @pl.when(grid.is_last)
    def _():
        d_q[...] *= rules.scale


def _d_keys_kernel(*refs: Any, grid: Grid, rules: Rules) -> None:
    *bounds, q, k, v, d_out, lse, delta, row_marks, key_marks, d_k, d_v, columns = refs

    @pl.when(grid.is_first)
    def _():
        grid.keep_columns(columns, key_marks)
        d_k[...] = jnp.zeros(d_k.shape, jnp.float32)
        d_v[...] = jnp.zeros(d_v.shape, jnp.float32)

    @functools.partial(when_seen, grid, rules, *bounds)
    def _(key_block: Any):
        is_visible = mask(grid, rules, columns, row_marks, key_block)
        weights, d_scores = tiles.differentiate_tile(
            (k[...], v[...]), (q[...], d_out[...]), lse[...], delta[...], is_visible, rules
        )
        d_v[...] += tiles.dot(weights.astype(d_out.dtype), d_out[...], ((1,), (0,)))
        d_k[...] += tiles.dot(d_scores.astype(q.dtype), q[...], ((1,), (0,)))

    @pl.when(grid.is_last)
    def _():
        d_k[...] *= rules.scale
