# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Computes the backward pass of ring attention as one TPU kernel.

K and V rotate (ring_keys.py), and the sums of their gradients follow them, a step behind:

    turn t, with the keys of rank r - s:
        part   = the contribution of this rank's queries; dQ stays, and is summed here
        total  = part + the sum of the ranks before (step > 0), which arrived during this turn
        total goes to the next rank during its next turn; from the last step it comes home

The arithmetic of a turn therefore hides the transfer of keys and that of the sums of the turn
before. Sums are float32, with 2 slots here to add up in (one is sent while the other is summed) and
2 to arrive in. **Capacity**: what is sent at the end of turn t arrives in slot (t + 1) % 2, which
the next rank has emptied at the end of its turn t - 1. From turn 1 on it signals that on a
semaphore, as often as a rank will wait for it.

One product of scores serves all three gradients: five products a tile where flash_attention has
seven, in return for two that contract over rows. Formulas: flash_attention/kernels.py.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.array_types import Array
from pallas_kernels.flash_attention.kernels import AttentionOperands, OutGradient
from pallas_kernels.flash_attention.mask import Rules
from pallas_kernels.flash_attention.tpu.blocks import TileSizes
from pallas_kernels.flash_attention.tpu.tiles import column, differentiate_tile, dot
from pallas_kernels.jax_versions import shape_varying_like
from pallas_kernels.ring.remote_dma.ring_keys import (
    KeyTravel,
    Shape,
    pad_row,
    prepare,
    tile_mask,
    vmem_budget,
)


def differentiate_ring(
    operands: AttentionOperands, gradient: OutGradient, *, axis_name: str
) -> tuple[Array, Array, Array]:
    """Return the gradients of attention to the keys of all ranks of an axis, in float32.

    Args:
        operands: Arrays of this rank; its positions must be given, for queries and keys alike.
        gradient: Gradient of the output, and numbers of the whole softmax.
        axis_name: Mesh axis of the ring.
    """
    shape, scalars, marks = prepare(operands, axis_name)
    q, k, v, *_ = operands
    d_out, lse, delta = gradient
    sizes = shape.sizes
    like = (q, k, v, d_out, lse, delta, scalars[0])
    # Weights are 0 where a query sees no key; -inf would turn them into NaN.
    lse = jnp.where(jnp.isfinite(lse), lse, 0.0)
    rows = [shape.by_head(sizes.to_rows(x)) for x in (q, d_out)]
    rows += [shape.by_head(sizes.to_statistics(x)) for x in (lse, delta)]

    def result(length: int, width: int) -> Any:
        return shape_varying_like((shape.heads, length, width), jnp.float32, *like)

    d_q, d_k, d_v = pl.pallas_call(
        functools.partial(_kernel, shape=shape),
        grid_spec=_grid_spec(shape, q.dtype),
        out_shape=[
            result(sizes.rows, sizes.h),
            result(sizes.keys, sizes.h),
            result(sizes.keys, sizes.hv),
        ],
        name="differentiate_ring",
        cost_estimate=shape.cost(5, q.dtype.itemsize, is_backward=True),
        compiler_params=shape.compiler_params(_vmem_bytes(sizes, q.dtype.itemsize)),
    )(*scalars, *rows, *marks, *(shape.by_head(sizes.to_keys(x)) for x in (k, v)))
    d_k, d_v = (sizes.from_keys(shape.from_head(x)) for x in (d_k, d_v))
    return sizes.from_rows(shape.from_head(d_q)), d_k, d_v


def fits(q: Array, k: Array, v: Array, rules: Rules) -> bool:
    """Return whether the arrays of a rank fit VMEM of the chips that the kernel is for."""
    return _vmem_bytes(TileSizes.of(q, k, v, rules), q.dtype.itemsize) <= vmem_budget()


def _vmem_bytes(sizes: TileSizes, itemsize: int) -> int:
    widths = pad_row(sizes.h) + pad_row(sizes.hv)
    return sizes.keys * widths * (2 * itemsize + 4 * 4) + sizes.rows * pad_row(sizes.h) * 4


def _grid_spec(shape: Shape, dtype: Any) -> Any:
    sizes = shape.sizes
    r = shape.sizes.row_block
    in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    sums = [pltpu.VMEM((2, sizes.keys, width), jnp.float32) for width in (sizes.h, sizes.hv)]
    return pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=2,
        grid=shape.grid,
        in_specs=[
            shape.rows(sizes.h),
            shape.rows(sizes.hv),
            shape.statistics(),
            shape.statistics(),
            shape.row_marks(),
            shape.key_marks(),
            in_hbm,
            in_hbm,
        ],
        out_specs=[
            pl.BlockSpec(
                (1, r, sizes.h),
                lambda head, step, block, *_: (head, shape.finished_block(step, block), 0),
            ),
            in_hbm,
            in_hbm,
        ],
        scratch_shapes=[
            pltpu.VMEM((sizes.row_blocks, r, sizes.h), jnp.float32),
            *sums,
            *sums,
            pltpu.SemaphoreType.DMA((2,)),
            pltpu.SemaphoreType.DMA((2, 2)),
            pltpu.SemaphoreType.DMA((2,)),
            pltpu.SemaphoreType.REGULAR,
            *shape.slots(dtype),
        ],
    )


def _kernel(*refs: Any, shape: Shape) -> None:
    place, visits, q, d_out, lse, delta, row_marks, key_marks, k, v, d_q, d_k, d_v, *scratch = refs
    sums_q, sums_k, sums_v, from_k, from_v, *scratch = scratch
    semaphores = scratch[:4]
    slots = scratch[4:]
    travel = KeyTravel(shape, place, (k, v), slots)
    sums = _SumTravel(
        travel, ((sums_k, from_k, d_k), (sums_v, from_v, d_v)), semaphores, shape.rules.scale
    )
    d_q_here = sums_q.at[travel.block]
    d_k_here = sums_k.at[travel.slot]
    d_v_here = sums_v.at[travel.slot]

    @pl.when(travel.is_first_block)
    def _():
        travel.begin()

        @pl.loop(0, shape.sizes.key_blocks)
        def _(index):
            for ref in (d_k_here, d_v_here):
                at = shape.keys(index)
                ref[at] = jnp.zeros((shape.sizes.key_block, ref.shape[1]), jnp.float32)

    @pl.when(travel.step == 0)
    def _():
        d_q_here[...] = jnp.zeros(d_q_here.shape, jnp.float32)

    def add(index: Any, is_masked: bool) -> None:
        at = shape.keys(index)
        keys = travel.keys[at]
        weights, d_scores = differentiate_tile(
            (q[0], d_out[0]),
            (keys, travel.values[at]),
            column(lse[...])[:, :1],
            column(delta[...])[:, :1],
            tile_mask(shape, row_marks, key_marks, index) if is_masked else None,
            shape.rules,
        )
        d_scores = d_scores.astype(keys.dtype)
        d_q_here[...] += dot(d_scores, keys, ((1,), (0,)))
        d_k_here[at] += dot(d_scores, q[0], ((0,), (0,)))
        d_v_here[at] += dot(weights.astype(keys.dtype), d_out[0], ((0,), (0,)))

    travel.for_visible(visits, place, add)

    @pl.when(travel.is_last_step)
    def _():
        d_q[0] = shape.rules.scale * d_q_here[...]

    @pl.when(travel.is_last_block)
    def _():
        travel.end()
        sums.pass_on()

        @pl.when(travel.turn == shape.turns - 1)
        def _():
            sums.finish()
            travel.leave()


class _SumTravel:
    """The gradients of keys and values at the end of a turn, inside a kernel."""

    def __init__(self, travel: KeyTravel, sides: Any, semaphores: Any, scale: float):
        self._travel = travel
        self._sides = sides
        self._scale = scale
        self._send, self._receive, self._store, self._capacity = semaphores

    def pass_on(self) -> None:
        """Add the sums that arrived, or store those that came home, and send the sum on."""
        travel = self._travel
        turn = self._travel.turn
        slot = self._travel.slot
        self._scale_keys(slot)

        @pl.when(turn > 0)
        def _():
            for copy in self._sending(1 - slot):
                copy.wait_send()
                copy.wait_recv()

            @pl.when(travel.step > 0)
            def _():
                self._add(slot)

            @pl.when(travel.step == 0)
            def _():
                self._store_home(slot, travel.head - 1)

            @pl.when(turn + 1 < travel.shape.turns)
            def _():
                pl.semaphore_signal(self._capacity, 1, device_id=travel.previous)

        pl.when(turn > 1)(lambda: pl.semaphore_wait(self._capacity, 1))
        for copy in self._sending(slot):
            copy.start()

    def finish(self) -> None:
        """Wait for the sum of the last turn, and store the last head's."""
        slot = self._travel.slot
        for copy in self._sending(slot):
            copy.wait_send()
            copy.wait_recv()
        self._store_home(1 - slot, self._travel.head)

    def _sending(self, slot: Any) -> list[Any]:
        """Return the copies from a slot of sums to the arrival slot of the next rank."""
        return [
            pltpu.make_async_remote_copy(
                sums.at[slot],
                arrived.at[1 - slot],
                self._send.at[side],
                self._receive.at[1 - slot, side],
                self._travel.next,
            )
            for side, (sums, arrived, _) in enumerate(self._sides)
        ]

    def _store_home(self, slot: Any, head: Any) -> None:
        copies = [
            pltpu.make_async_copy(arrived.at[slot], output.at[head], self._store.at[side])
            for side, (_, arrived, output) in enumerate(self._sides)
        ]
        for copy in copies:
            copy.start()
        for copy in copies:
            copy.wait()

    def _scale_keys(self, slot: Any) -> None:
        sums = self._sides[0][0]
        shape = self._travel.shape

        @pl.loop(0, shape.sizes.key_blocks)
        def _(index):
            sums[slot, shape.keys(index)] *= self._scale

    def _add(self, slot: Any) -> None:
        shape = self._travel.shape

        @pl.loop(0, shape.sizes.key_blocks)
        def _(index):
            at = shape.keys(index)
            for sums, arrived, _ in self._sides:
                sums[slot, at] += arrived[slot, at]
