# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Computes the forward pass of ring attention as one TPU kernel, in which K and V travel.

The softmax of a head's queries is never merged: it runs on over the keys of all ranks in VMEM, and
only `out` and `lse` are written. ring_keys.py rotates the keys.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.array_types import Array, Float, Float32
from pallas_kernels.flash_attention.kernels import AttentionOperands
from pallas_kernels.flash_attention.mask import Rules
from pallas_kernels.flash_attention.tpu.blocks import TileSizes
from pallas_kernels.flash_attention.tpu.tiles import (
    RunningSoftmax,
    attend_tile,
    column,
    finish,
    nothing_seen,
    row,
)
from pallas_kernels.jax_versions import shape_varying_like
from pallas_kernels.ring.remote_dma.ring_keys import (
    KeyTravel,
    Shape,
    pad_row,
    prepare,
    tile_mask,
    vmem_budget,
)


def attend_ring(
    operands: AttentionOperands, *, axis_name: str
) -> tuple[Float[Array, "B S N Hv"], Float32[Array, "B N S"]]:
    """Return attention to the keys of all ranks of an axis.

    Args:
        operands: Arrays of this rank; its positions must be given, for queries and keys alike.
        axis_name: Mesh axis of the ring.

    Returns:
        out in the dtype of q, and lse.
    """
    shape, scalars, marks = prepare(operands, axis_name)
    q, k, v, *_ = operands
    sizes = shape.sizes
    like = (q, k, v, scalars[0])
    out, lse = pl.pallas_call(
        functools.partial(_kernel, shape=shape),
        grid_spec=_grid_spec(shape, q.dtype),
        out_shape=[
            shape_varying_like((shape.heads, sizes.rows, sizes.hv), q.dtype, *like),
            shape_varying_like(
                (shape.heads, sizes.row_blocks, 1, sizes.row_block), jnp.float32, *like
            ),
        ],
        name="attend_ring",
        cost_estimate=shape.cost(2, q.dtype.itemsize),
        compiler_params=shape.compiler_params(_vmem_bytes(sizes, q.dtype.itemsize)),
    )(
        *scalars,
        shape.by_head(sizes.to_rows(q)),
        *marks,
        *(shape.by_head(sizes.to_keys(x)) for x in (k, v)),
    )
    out = sizes.from_rows(shape.from_head(out))
    return out, sizes.from_statistics(shape.from_head(lse))


def fits(q: Array, k: Array, v: Array, rules: Rules) -> bool:
    """Return whether the arrays of a rank fit VMEM of the chips that the kernel is for."""
    return _vmem_bytes(TileSizes.of(q, k, v, rules), q.dtype.itemsize) <= vmem_budget()


def _vmem_bytes(sizes: TileSizes, itemsize: int) -> int:
    slots = 2 * sizes.keys * (pad_row(sizes.h) + pad_row(sizes.hv)) * itemsize
    # Two numbers of a row take the eight sublanes of their register.
    return slots + sizes.rows * (pad_row(sizes.hv) + 8) * 4


def _grid_spec(shape: Shape, dtype: Any) -> Any:
    sizes = shape.sizes
    r = shape.sizes.row_block
    in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    return pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=2,
        grid=shape.grid,
        in_specs=[shape.rows(sizes.h), shape.row_marks(), shape.key_marks(), in_hbm, in_hbm],
        out_specs=[
            pl.BlockSpec(
                (1, r, sizes.hv),
                lambda head, step, block, *_: (head, shape.finished_block(step, block), 0),
            ),
            pl.BlockSpec(
                (None, None, 1, r),
                lambda head, step, block, *_: (head, shape.finished_block(step, block), 0, 0),
            ),
        ],
        scratch_shapes=[
            pltpu.VMEM((sizes.row_blocks, 2, r), jnp.float32),
            pltpu.VMEM((sizes.row_blocks, r, sizes.hv), jnp.float32),
            pltpu.VMEM((r, 1), jnp.float32),
            pltpu.VMEM((r, 1), jnp.float32),
            *shape.slots(dtype),
        ],
    )


def _kernel(*refs: Any, shape: Shape) -> None:
    place, visits, q, row_marks, key_marks, k, v, out, lse, *scratch = refs
    statistics, sums, top, total, *slots = scratch
    travel = KeyTravel(shape, place, (k, v), slots)
    state = (top, total, sums.at[travel.block])
    statistics = statistics.at[travel.block]
    pl.when(travel.is_first_block)(travel.begin)

    @pl.when(travel.step == 0)
    def _():
        for ref, value in zip(
            state, nothing_seen(shape.sizes.row_block, shape.sizes.hv), strict=True
        ):
            ref[...] = value

    # Between steps a block's statistics are stored along the lanes; a column would fill 128.
    @pl.when(travel.step > 0)
    def _():
        for at, ref in enumerate(state[:2]):
            ref[...] = column(statistics[at : at + 1])[:, :1]

    def fold(index: Any, is_masked: bool) -> None:
        keys = shape.keys(index)
        values = attend_tile(
            RunningSoftmax(*(ref[...] for ref in state)),
            q[0],
            travel.keys[keys],
            travel.values[keys],
            tile_mask(shape, row_marks, key_marks, index) if is_masked else None,
            shape.rules,
        )
        for ref, value in zip(state, values, strict=True):
            ref[...] = value

    travel.for_visible(visits, place, fold)
    for at, ref in enumerate(state[:2]):
        statistics[at : at + 1] = row(ref[...])

    @pl.when(travel.is_last_step)
    def _():
        values, columns = finish(RunningSoftmax(*(ref[...] for ref in state)))
        out[0] = values.astype(out.dtype)
        lse[...] = row(columns)

    pl.when(travel.is_last_block)(travel.end)
    pl.when(travel.is_last_block & (travel.turn == shape.turns - 1))(travel.leave)
