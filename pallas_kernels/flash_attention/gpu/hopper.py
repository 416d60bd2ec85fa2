# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Implements the forward pass of flash_attention for Hopper with Mosaic GPU, and `KERNELS`.

FlashAttention-3 (arXiv 2407.08608) without its low precision. A program has three warpgroups:

    2 that compute   64 rows each of the block that the program writes; they share the blocks of the
                     other side
    1 that loads     blocks of the other side, by TMA into a ring of `stages` slots in shared
                     memory; it gives most of its registers to the other two

A slot has two barriers: `full`, at which its copies arrive, and `free`, at which both computing
warpgroups do. In the forward pass the two take turns (`turn`, section 3.1): while one multiplies,
the other exponentiates. In the backward pass they run freely, and products start in pairs.

    attend        128 queries of one head; keys and values pass
    d_q           the same, with P from lse
    d_k and d_v   128 keys of one key head; the queries of all its query heads pass, with lse and
                  delta. Scores are [keys queries], so that P and dS are left operands, which
                  WGMMA takes from registers

visible_blocks.py lists the blocks that a block meets; programs with the most work are at the end of
a causal sequence, and start first. Results in float32 are stored straight from registers.

Heads are padded to multiples of 64 and lengths to multiples of 128, with zeros. `reason_against` in
hopper_tiles.py has the unsupported cases and the tile sizes. On the CPU the kernels run
interpreted (`interpret=InterpretGPUParams()`).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.array_types import Array, Float
from pallas_kernels.flash_attention.gpu.hopper_backward import differentiate
from pallas_kernels.flash_attention.gpu.hopper_parts import (
    LOG2_E,
    AttentionCall,
    Walk,
    fill,
    fill_tokens,
    load_ring,
    logits_of,
)
from pallas_kernels.flash_attention.gpu.hopper_tiles import KEPT, tiles_forward
from pallas_kernels.flash_attention.kernels import AttentionOperands, Kernels
from pallas_kernels.flash_attention.visible_blocks import kinds_of_blocks, list_visible
from pallas_kernels.gpu.hopper_parts import (
    COMPUTING,
    REGISTERS_COMPUTING,
    ROWS,
    along,
    call,
    shared_memory,
    slot_of,
)
from pallas_kernels.jax_versions import mosaic_gpu as plgpu
from pallas_kernels.jax_versions import store_in_global


def _attend_kernel(
    q_ref, k_ref, v_ref, order_ref, counts_ref, *refs, static, tiles, q_blocks,
):  # fmt: skip
    sequence = jax.lax.axis_index("b")
    head = jax.lax.axis_index("n")
    rules = static.rules
    registers = static.registers
    group_of = jnp.int32(static.group)
    mask, refs = static.mask(refs, sequence)
    out_ref, lse_ref, q_smem, k_smem, v_smem, out_smem, full_q, full_k, full_v, *barriers = refs
    free_k, free_v, turn = barriers
    block = q_blocks - 1 - jax.lax.axis_index("i")
    warpgroup = jax.lax.axis_index("warpgroup")
    walk = Walk.of(order_ref, counts_ref, sequence, block)
    passing = tiles.passing
    dtype = k_smem.dtype
    shape = (ROWS, passing)
    width = v_smem.shape[-1]

    def take_turn() -> None:
        plgpu.barrier_arrive(turn)
        plgpu.barrier_wait(turn)

    @pl.when(warpgroup < COMPUTING)
    def _compute():
        plgpu.set_max_registers(REGISTERS_COMPUTING, action="increase")
        start = block * KEPT + warpgroup * ROWS
        queries = q_smem.at[warpgroup]
        rows = pl.ds(start, ROWS)
        plgpu.copy_gmem_to_smem(q_ref.at[sequence, rows, head], queries, full_q.at[warpgroup])
        plgpu.barrier_wait(full_q.at[warpgroup])
        steps = walk.steps()

        @pl.when(steps > 0)
        def _first():
            plgpu.barrier_wait(full_k.at[0])

        pl.when(warpgroup == 1)(take_turn)

        def step(at: Array, carry: Any, is_masked: bool) -> Any:
            out, top, total = carry
            slot = slot_of(at, tiles.stages)

            pair = (queries, k_smem.at[slot])
            (products,) = registers.products(shape, pair, started=take_turn)
            logits = logits_of(products, rules)
            registers.free(free_k.at[slot])
            if is_masked:
                is_visible = mask.of((start, walk.at(at)[0] * passing), shape, 0)
                logits = jnp.where(is_visible, logits, -jnp.inf)
            new_top = jnp.maximum(top, logits.max(axis=1))
            # Rows that have seen no key: all is -inf, and weights must be 0.
            base = jnp.where(new_top == -jnp.inf, 0.0, new_top) if is_masked else new_top
            shrink = jnp.exp2(top - base)
            weights = jnp.exp2(logits - along(base, shape, 0))
            total = total * shrink + weights.sum(axis=1)
            out = out * along(shrink, out.shape, 0)
            narrow = weights.astype(dtype)
            # All of the softmax comes before the turn passes to the other warpgroup.
            out, new_top, total, narrow = jax.lax.optimization_barrier(
                (out, new_top, total, narrow)
            )
            plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(full_v.at[slot])
            plgpu.barrier_wait(turn)

            def await_next() -> None:
                @pl.when(at + 1 < steps)
                def _next():
                    plgpu.barrier_wait(full_k.at[slot_of(at + 1, tiles.stages)])

            pair = (narrow, v_smem.at[slot])
            (out,) = registers.add((out,), pair, started=await_next)
            registers.free(free_v.at[slot])
            return out, new_top, total

        carry = (
            registers.constant((ROWS, width), 0.0),
            registers.constant((ROWS,), -jnp.inf),
            registers.constant((ROWS,), 0.0),
        )
        out, top, total = walk.fold(step, carry)
        pl.when(warpgroup == 0)(take_turn)

        is_seen = total > 0.0
        total_or_1 = jnp.where(is_seen, total, 1.0)
        lse = (top + jnp.log2(total_or_1)) * (1.0 / LOG2_E)
        store_in_global(lse_ref.at[sequence, head, rows], jnp.where(is_seen, lse, -jnp.inf))
        own_out = (q_smem if out_smem is None else out_smem).at[warpgroup]
        own_out[...] = (out * along(1.0 / total_or_1, out.shape, 0)).astype(dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(own_out, out_ref.at[sequence, rows, head])
        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == COMPUTING)
    def _load():
        kv_head = jax.lax.div(head, group_of)

        def copy(ref: Any, smem: Any, full: Any, block: Array, _: Array, slot: Array) -> None:
            source = ref.at[sequence, pl.ds(block * passing, passing), kv_head]
            plgpu.copy_gmem_to_smem(source, smem.at[slot], full.at[slot])

        keys = functools.partial(copy, k_ref, k_smem, full_k)
        values = functools.partial(copy, v_ref, v_smem, full_v)
        load_ring(walk, tiles.stages, ((free_k, keys), (free_v, values)))


def attend(
    operands: AttentionOperands, *, interpret: Any = None
) -> tuple[Float[Array, "B S N Hv"], Float[Array, "B N S"]]:
    """Return what `pallas_kernels.flash_attention` returns."""
    q, k, v, tokens, rules = operands
    (b, s, n, _), (_, u, _, hv), dtype = q.shape, v.shape, q.dtype
    tiles = tiles_forward(q.shape[3], hv)
    assert tiles is not None  # checked by reason_against
    filled = fill_tokens(tokens)
    q = fill(q)
    k = fill(k)
    v = fill(v)
    lists = list_visible(kinds_of_blocks(rules, tokens, (s, u), (KEPT, tiles.passing)))
    blocks = q.shape[1] // KEPT
    h = q.shape[3]
    wide = v.shape[3]
    ring = plgpu.Barrier(num_barriers=tiles.stages)
    free = plgpu.Barrier(num_arrivals=COMPUTING, num_barriers=tiles.stages)
    out, lse = call(
        functools.partial(
            _attend_kernel,
            static=AttentionCall.of(operands, interpret),
            tiles=tiles,
            q_blocks=blocks,
        ),
        (q, k, v, *lists, *filled),
        (
            jax.ShapeDtypeStruct((b, q.shape[1], n, wide), dtype),
            jax.ShapeDtypeStruct((b, n, q.shape[1]), jnp.float32),
        ),
        (
            shared_memory((COMPUTING, ROWS, h), dtype),
            shared_memory((tiles.stages, tiles.passing, h), dtype),
            shared_memory((tiles.stages, tiles.passing, wide), dtype),
            None if wide == h else shared_memory((COMPUTING, ROWS, wide), dtype),
            plgpu.Barrier(num_barriers=COMPUTING),
            ring,
            ring,
            free,
            free,
            plgpu.Barrier(num_arrivals=COMPUTING),
        ),
        (blocks, b, n),
        ("i", "b", "n"),
        interpret,
    )
    return out[:, :s, :, :hv], lse[:, :, :s]


KERNELS = Kernels(attend, differentiate)
