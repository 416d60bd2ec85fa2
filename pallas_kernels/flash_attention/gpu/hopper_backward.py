# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Implements the backward pass of flash_attention for Hopper, d_q apart from d_k and d_v.

See hopper.py, and kernels.py for the formulas. Seven products where a single kernel would need
five: no two programs write to the same place, so that results do not depend on the order in which
programs run. Where the sums of d_k and d_v do not fit the registers together, each has a kernel of
its own, and there are eight.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.array_types import Array
from pallas_kernels.flash_attention.gpu.hopper_parts import (
    LOG2_E,
    AttentionCall,
    Walk,
    fill,
    fill_last,
    fill_tokens,
    load_ring,
    logits_of,
    multiply_slope,
)
from pallas_kernels.flash_attention.gpu.hopper_tiles import KEPT, Tiles, tiles_backward
from pallas_kernels.flash_attention.kernels import AttentionOperands, OutGradient
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


def _d_q_kernel(
    q_ref, k_ref, v_ref, d_out_ref, lse_ref, delta_ref, order_ref, counts_ref, *refs, static,
    tiles, q_blocks,
):  # fmt: skip
    sequence = jax.lax.axis_index("b")
    head = jax.lax.axis_index("n")
    rules = static.rules
    registers = static.registers
    group_of = jnp.int32(static.group)
    mask, refs = static.mask(refs, sequence)
    d_q_ref, q_smem, d_out_smem, k_smem, v_smem, full_q, full, free = refs
    block = q_blocks - 1 - jax.lax.axis_index("i")
    warpgroup = jax.lax.axis_index("warpgroup")
    walk = Walk.of(order_ref, counts_ref, sequence, block)
    passing = tiles.passing
    dtype = k_smem.dtype
    shape = (ROWS, passing)

    @pl.when(warpgroup < COMPUTING)
    def _compute():
        plgpu.set_max_registers(REGISTERS_COMPUTING, action="increase")
        start = block * KEPT + warpgroup * ROWS
        rows = pl.ds(start, ROWS)
        ready = full_q.at[warpgroup]
        q = q_smem.at[warpgroup]
        d_out = d_out_smem.at[warpgroup]
        plgpu.copy_gmem_to_smem(q_ref.at[sequence, rows, head], q, ready)
        plgpu.copy_gmem_to_smem(d_out_ref.at[sequence, rows, head], d_out, ready)
        lse = registers.load(lse_ref.at[sequence, head, rows], 0)
        delta = registers.load(delta_ref.at[sequence, head, rows], 0)
        plgpu.barrier_wait(ready)

        def step(at: Array, d_q: Array, is_masked: bool) -> Array:
            slot = slot_of(at, tiles.stages)
            plgpu.barrier_wait(full.at[slot])
            products, d_weights = registers.products(
                shape, (q, k_smem.at[slot]), (d_out, v_smem.at[slot])
            )
            logits = logits_of(products, rules)
            weights = jnp.exp2(logits - along(lse, shape, 0))
            if is_masked:
                is_visible = mask.of((start, walk.at(at)[0] * passing), shape, 0)
                weights = jnp.where(is_visible, weights, 0.0)
            d_logits = multiply_slope(weights * (d_weights - along(delta, shape, 0)), logits, rules)
            (d_q,) = registers.add((d_q,), (d_logits.astype(dtype), k_smem.at[slot]))
            registers.free(free.at[slot])
            return d_q

        d_q = registers.constant((ROWS, q_smem.shape[-1]), 0.0)
        store_in_global(d_q_ref.at[sequence, rows, head], walk.fold(step, d_q) * rules.scale)

    @pl.when(warpgroup == COMPUTING)
    def _load():
        kv_head = jax.lax.div(head, group_of)

        def copies(block: Array, _: Array, slot: Array) -> None:
            source = (sequence, pl.ds(block * passing, passing), kv_head)
            for ref, smem in ((k_ref, k_smem), (v_ref, v_smem)):
                plgpu.copy_gmem_to_smem(ref.at[source], smem.at[slot], full.at[slot])

        load_ring(walk, tiles.stages, ((free, copies),))


def _d_kv_kernel(
    q_ref, k_ref, v_ref, d_out_ref, lse_ref, delta_ref, order_ref, counts_ref, *refs, static,
    tiles, names,
):  # fmt: skip
    sequence = jax.lax.axis_index("b")
    head = jax.lax.axis_index("m")
    rules = static.rules
    registers = static.registers
    group = static.group
    mask, refs = static.mask(refs, sequence)
    results = refs[: len(names)]
    refs = refs[len(names) :]
    k_smem, v_smem, q_smem, d_out_smem, lse_smem, delta_smem, full_k, full, free = refs
    block = jax.lax.axis_index("i")
    warpgroup = jax.lax.axis_index("warpgroup")
    walk = Walk.of(order_ref, counts_ref, sequence, block, heads=group)
    passing = tiles.passing
    dtype = k_smem.dtype
    shape = (ROWS, passing)

    @pl.when(warpgroup < COMPUTING)
    def _compute():
        plgpu.set_max_registers(REGISTERS_COMPUTING, action="increase")
        start = block * KEPT + warpgroup * ROWS
        rows = pl.ds(start, ROWS)
        ready = full_k.at[warpgroup]
        k = k_smem.at[warpgroup]
        v = v_smem.at[warpgroup]
        plgpu.copy_gmem_to_smem(k_ref.at[sequence, rows, head], k, ready)
        plgpu.copy_gmem_to_smem(v_ref.at[sequence, rows, head], v, ready)
        plgpu.barrier_wait(ready)

        def step(at: Array, sums: Any, is_masked: bool) -> Any:
            slot = slot_of(at, tiles.stages)
            plgpu.barrier_wait(full.at[slot])
            q = q_smem.at[slot]
            d_out = d_out_smem.at[slot]
            pairs = ((k, q), (v, d_out)) if "k" in names else ((k, q),)
            products, *d_weights = registers.products(shape, *pairs)
            logits = logits_of(products, rules)
            lse = registers.load(lse_smem.at[slot], 1)
            weights = jnp.exp2(logits - along(lse, shape, 1))
            if is_masked:
                is_visible = mask.of((walk.at(at)[0] * passing, start), shape, 1)
                weights = jnp.where(is_visible, weights, 0.0)
            added = {"v": (weights.astype(dtype), d_out)}
            for d_weight in d_weights:
                delta = registers.load(delta_smem.at[slot], 1)
                d_logits = multiply_slope(
                    weights * (d_weight - along(delta, shape, 1)), logits, rules
                )
                added["k"] = (d_logits.astype(dtype), q)
            sums = registers.add(sums, *(added[name] for name in names))
            registers.free(free.at[slot], has_loaded=True)
            return sums

        widths = {"k": k_smem.shape[-1], "v": v_smem.shape[-1]}
        sums = tuple(registers.constant((ROWS, widths[name]), 0.0) for name in names)
        for name, ref, total in zip(names, results, walk.fold(step, sums), strict=True):
            store_in_global(
                ref.at[sequence, rows, head], total * rules.scale if name == "k" else total
            )

    @pl.when(warpgroup == COMPUTING)
    def _load():
        def copies(block: Array, member: Array, slot: Array) -> None:
            rows = pl.ds(block * passing, passing)
            q_head = head * group + member
            for ref, smem in ((q_ref, q_smem), (d_out_ref, d_out_smem)):
                source = ref.at[sequence, rows, q_head]
                plgpu.copy_gmem_to_smem(source, smem.at[slot], full.at[slot])
            for ref, smem in ((lse_ref, lse_smem), (delta_ref, delta_smem)):
                source = ref.at[sequence, q_head, rows]
                plgpu.copy_gmem_to_smem(source, smem.at[slot], full.at[slot])

        load_ring(walk, tiles.stages, ((free, copies),))


def differentiate(
    operands: AttentionOperands, gradient: OutGradient, *, interpret: Any = None
) -> tuple[Array, Array, Array]:
    """Return the gradients defined in `pallas_kernels.flash_attention.kernels`."""
    q, k, v, tokens, rules = operands
    d_out, lse, delta = gradient
    (b, s, n, h), (_, u, m, hv), dtype = q.shape, v.shape, q.dtype
    tiles = tiles_backward(h, hv)
    assert tiles is not None  # checked by reason_against
    filled = fill_tokens(tokens)
    q = fill(q)
    k = fill(k)
    v = fill(v)
    d_out = fill(d_out)
    # Weights are 0 where a query sees no key; -inf - -inf would be NaN.
    lse = fill_last(jnp.where(jnp.isfinite(lse), lse, 0.0) * LOG2_E)
    arrays = (q, k, v, d_out, lse, fill_last(delta))
    static = AttentionCall.of(operands, interpret)
    q_blocks = q.shape[1] // KEPT
    kv_blocks = k.shape[1] // KEPT
    by_query, by_key = tiles
    key_slots = tuple(shared_memory((COMPUTING, ROWS, x.shape[3]), dtype) for x in (k, v))
    all_computed = plgpu.Barrier(num_arrivals=2, num_barriers=COMPUTING)

    def ring(tile_config: Tiles, arrivals: int) -> tuple[Any, ...]:
        full = plgpu.Barrier(num_arrivals=arrivals, num_barriers=tile_config.stages)
        return full, plgpu.Barrier(num_arrivals=COMPUTING, num_barriers=tile_config.stages)

    def slots(tile_config: Tiles) -> tuple[Any, ...]:
        return tuple(
            shared_memory((tile_config.stages, tile_config.passing, x.shape[3]), dtype)
            for x in (k, v)
        )

    lists = list_visible(kinds_of_blocks(rules, tokens, (s, u), (KEPT, by_query.passing)))
    (d_q,) = call(
        functools.partial(_d_q_kernel, static=static, tiles=by_query, q_blocks=q_blocks),
        (*arrays, *lists, *filled),
        (jax.ShapeDtypeStruct(q.shape, jnp.float32),),
        (*key_slots, *slots(by_query), all_computed, *ring(by_query, 2)),
        (q_blocks, b, n),
        ("i", "b", "n"),
        interpret,
    )
    kinds = kinds_of_blocks(rules, tokens, (s, u), (by_key.passing, KEPT))
    # The lists count blocks of the true lengths: blocks of padding are in none.
    lists = list_visible(kinds.swapaxes(1, 2))
    numbers = plgpu.SMEM((by_key.stages, by_key.passing), jnp.float32)
    d_kv = {}
    for names in by_key.together:
        results = call(
            functools.partial(_d_kv_kernel, static=static, tiles=by_key, names=names),
            (*arrays, *lists, *filled),
            tuple(
                jax.ShapeDtypeStruct({"k": k, "v": v}[name].shape, jnp.float32) for name in names
            ),
            (*key_slots, *slots(by_key), numbers, numbers, all_computed, *ring(by_key, 4)),
            (kv_blocks, b, m),
            ("i", "b", "m"),
            interpret,
        )
        d_kv |= zip(names, results, strict=True)
    d_k = d_kv["k"]
    d_v = d_kv["v"]
    return d_q[:, :s, :, :h], d_k[:, :u, :, :h], d_v[:, :u, :, :hv]
