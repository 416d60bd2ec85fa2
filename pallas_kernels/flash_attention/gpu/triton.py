# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Implements flash_attention in Triton, for any NVIDIA GPU with tensor cores.

FlashAttention-2 (arXiv 2307.08691): three kernels, one program per block that they write.

    attend        a block of queries of one head against the keys that it meets
    d_q           the same, with P from lse
    d_k and d_v   a block of keys of one key head against the queries of all its query heads that
                  meet it, so that grouped heads are summed in registers

Exponentials are to base 2, as in hardware. visible_blocks.py lists the blocks that a block meets.
Lengths are padded to whole blocks and heads to powers of two, with zeros: a copy where they do not
fit. Products of float32 are exact float32 products, not TF32.

It does not run on TPUs, and on the CPU only interpreted (`interpret=True`).

JAX 0.11 deprecates Pallas through Triton, and warns once per program; its successor, Mosaic GPU,
needs Hopper. When JAX drops it, `kernel_for` has to send these GPUs to XLA.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.array_types import Array, Float
from pallas_kernels.flash_attention.kernels import AttentionOperands, Kernels, OutGradient
from pallas_kernels.flash_attention.mask import Rules, Tokens, sees
from pallas_kernels.flash_attention.visible_blocks import BlockLists, kinds_of_blocks, list_visible
from pallas_kernels.gpu.triton_parts import LOG2_E, capped_logits, dot
from pallas_kernels.jax_versions import shape_varying_like


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _AttentionBlocks:
    """Rows of the block that a program writes, and of those that it runs through."""

    kept: int
    passing: int


def _block_sizes(width: int, itemsize: int) -> tuple[_AttentionBlocks, _AttentionBlocks]:
    """Return the blocks of both passes: tiles that fit the 99 KiB of the smaller GPUs.

    Args:
        width: Larger one of the widths of a key and a value head.
        itemsize: Bytes of an element.
    """
    row = width * itemsize
    if itemsize == 4 and row <= 512:
        # Exact float32 products use no tensor core and are unrolled: only small tiles compile.
        return _AttentionBlocks(kept=64, passing=32), _AttentionBlocks(kept=32, passing=32)
    if row <= 128:
        return _AttentionBlocks(kept=128, passing=64), _AttentionBlocks(kept=64, passing=64)
    if row <= 256:
        return _AttentionBlocks(kept=128, passing=64), _AttentionBlocks(kept=64, passing=32)
    if row <= 512:
        return _AttentionBlocks(kept=64, passing=32), _AttentionBlocks(kept=32, passing=32)
    return _AttentionBlocks(kept=32, passing=16), _AttentionBlocks(kept=16, passing=16)


# Warps by head width, and copies in flight.
_COMPILER: Callable[[int], plgpu.CompilerParams] = lambda width: plgpu.CompilerParams(  # noqa: E731
    num_warps=4 if width <= 64 else 8, num_stages=2
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _TritonSizes:
    """Sizes of the arrays before padding."""

    b: int
    s: int
    u: int
    n: int
    m: int
    h: int
    hv: int

    @classmethod
    def of(cls, q: Array, k: Array, v: Array) -> "_TritonSizes":
        (b, s, n, h), (_, u, m, hv) = q.shape, v.shape
        return cls(b=b, s=s, u=u, n=n, m=m, h=h, hv=hv)


def _wide(width: int) -> int:
    return max(16, pl.next_power_of_2(width))


def _fill(x: Array, block: int) -> Array:
    """Pad [B L N H] to L in whole blocks, and H a power of two."""
    sizes = (0, -x.shape[1] % block, 0, _wide(x.shape[3]) - x.shape[3])
    return jnp.pad(x, [(0, size) for size in sizes]) if any(sizes) else x


def _fill_last(x: Array, block: int) -> Array:
    """Pad [... L] to whole blocks."""
    more = -x.shape[-1] % block
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, more)]) if more else x


def _fill_tokens(tokens: Tokens, block_q: int, block_k: int) -> Tokens:
    """Return [1 or B, L] in whole blocks, or None."""

    def fill(x: Array | None, block: int) -> Array | None:
        if x is None:
            return None
        return _fill_last((x if x.ndim == 2 else x[None]).astype(jnp.int32), block)

    blocks = (block_q, block_k, block_q, block_k)
    return Tokens(*(fill(x, block) for x, block in zip(tokens, blocks, strict=True)))


def _batch_index(size: int) -> Callable[[Any], Any]:
    """Return the row of a table that may hold one row for all sequences."""
    return (lambda b: 0) if size == 1 else (lambda b: b)


def _whole_row(x: Array) -> pl.BlockSpec:
    """Return the spec of a whole sequence [L]."""
    row = _batch_index(x.shape[0])
    return pl.BlockSpec((None, x.shape[1]), lambda i, b, n: (row(b), 0))


def _one_block(rows: int, width: int) -> pl.BlockSpec:
    """Return the spec of the block of one head [B L N width] that a program writes."""
    return pl.BlockSpec((None, rows, None, width), lambda i, b, n: (b, i, n, 0))


def _per_row(rows: int) -> pl.BlockSpec:
    """Return the spec of one number per row of that block, from [B N L]."""
    return pl.BlockSpec((None, None, rows), lambda i, b, n: (b, n, i))


def _all_keys(length: int, group: int, width: int) -> pl.BlockSpec:
    """Return the spec of all keys or values of a query head's key head."""
    return pl.BlockSpec((None, length, None, width), lambda i, b, n: (b, 0, n // group, 0))


def _all_queries(length: int, group: int, width: int) -> pl.BlockSpec:
    """Return the spec of the queries of all query heads of a key head."""
    return pl.BlockSpec((None, length, group, width), lambda i, b, m: (b, 0, m, 0))


def _token_specs(tokens: Tokens) -> Any:
    specs: list[Any] = [None if x is None else _whole_row(x) for x in tokens]
    return Tokens(*specs)


def _list_specs(lists: BlockLists) -> Any:
    row = _batch_index(lists.order.shape[0])
    num_listed = lists.order.shape[2]
    specs: list[Any] = [
        pl.BlockSpec((None, None, num_listed), lambda i, b, n: (row(b), i, 0)),
        pl.BlockSpec((None, None, 2), lambda i, b, n: (row(b), i, 0)),
    ]
    return BlockLists(*specs)


def _slope(logits: Array, rules: Rules) -> Array | None:
    """Return the derivative of the cap, from capped logits."""
    if rules.softcap is None:
        return None
    return 1.0 - jnp.square(logits * (1.0 / (rules.softcap * LOG2_E)))


def _mask(rules: Rules, tokens: Tokens, num_keys: int, q: Any, k: Any, q_axis: int) -> Array:
    """Return the mask, queries of `q` along `q_axis`, keys of `k` along the other."""

    def along(x: Array, axis: int) -> Array:
        return x[:, None] if axis == 0 else x[None, :]

    q_index, k_index = (x.start + jnp.arange(x.size, dtype=jnp.int32) for x in (q, k))
    q_ref, k_ref, q_segment_ref, k_segment_ref = tokens
    q_position = q_index if q_ref is None else q_ref[q]
    k_position = k_index if k_ref is None else k_ref[k]
    q_segment = None if q_segment_ref is None else along(q_segment_ref[q], q_axis)
    k_segment = None if k_segment_ref is None else along(k_segment_ref[k], 1 - q_axis)
    q_position = along(q_position, q_axis)
    k_position = along(k_position, 1 - q_axis)
    is_visible = sees(rules, q_position, k_position, q_segment, k_segment)
    return is_visible & along(k_index < num_keys, 1 - q_axis)


def _through(lists: BlockLists, step: Callable[..., Any], carry: Any) -> Any:
    """Fold step(block, carry, is_masked) over the list: WHOLE blocks, then MASKED ones."""
    num_unmasked = lists.counts[0]
    met = lists.counts[1]
    for start, end, is_masked in ((0, num_unmasked, False), (num_unmasked, met, True)):
        carry = jax.lax.fori_loop(
            start,
            end,
            lambda at, carry, is_masked=is_masked: step(lists.order[at], carry, is_masked),
            carry,
        )
    return carry


def _attend_kernel(q_ref, k_ref, v_ref, lists, tokens, out_ref, lse_ref, *, rules, blocks, u):
    q = q_ref[...]
    program_rows = pl.ds(pl.program_id(0) * blocks.kept, blocks.kept)

    def step(block: Array, carry: Any, is_masked: bool) -> Any:
        out, top, total = carry
        keys = pl.ds(block * blocks.passing, blocks.passing)
        logits = capped_logits(dot(q, k_ref[keys, :], 1, 1), rules)
        if is_masked:
            logits = jnp.where(_mask(rules, tokens, u, program_rows, keys, 0), logits, -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(logits, axis=1))
        # Rows that have seen no key: logits are -inf, and so must the result be.
        base = jnp.where(new_top == -jnp.inf, 0.0, new_top) if is_masked else new_top
        weights = jnp.exp2(logits - base[:, None])
        shrink = jnp.exp2(top - base)
        values = v_ref[keys, :]
        out = out * shrink[:, None] + dot(weights.astype(values.dtype), values, 1, 0)
        return out, new_top, total * shrink + jnp.sum(weights, axis=1)

    start = (
        jnp.zeros((blocks.kept, v_ref.shape[-1]), jnp.float32),
        jnp.full((blocks.kept,), -jnp.inf, jnp.float32),
        jnp.zeros((blocks.kept,), jnp.float32),
    )
    out, top, total = _through(lists, step, start)
    total_or_1 = jnp.where(total > 0, total, 1.0)
    out_ref[...] = (out / total_or_1[:, None]).astype(out_ref.dtype)
    lse = (top + jnp.log2(total_or_1)) * (1.0 / LOG2_E)
    lse_ref[...] = jnp.where(total > 0, lse, -jnp.inf)


def _d_q_kernel(
    q_ref, k_ref, v_ref, d_out_ref, lse_ref, delta_ref, lists, tokens, d_q_ref, *, rules, blocks, u
):
    q = q_ref[...]
    d_out = d_out_ref[...]
    lse = lse_ref[...]
    delta = delta_ref[...]
    program_rows = pl.ds(pl.program_id(0) * blocks.kept, blocks.kept)

    def step(block: Array, d_q: Array, is_masked: bool) -> Array:
        keys = pl.ds(block * blocks.passing, blocks.passing)
        k = k_ref[keys, :]
        logits = capped_logits(dot(q, k, 1, 1), rules)
        weights = jnp.exp2(logits - lse[:, None])
        if is_masked:
            weights = jnp.where(_mask(rules, tokens, u, program_rows, keys, 0), weights, 0.0)
        d_logits = weights * (dot(d_out, v_ref[keys, :], 1, 1) - delta[:, None])
        slope = _slope(logits, rules)
        d_logits = d_logits if slope is None else d_logits * slope
        return d_q + dot(d_logits.astype(k.dtype), k, 1, 0)

    d_q = _through(lists, step, jnp.zeros(d_q_ref.shape, jnp.float32))
    d_q_ref[...] = rules.scale * d_q


def _d_kv_kernel(
    q_ref, k_ref, v_ref, d_out_ref, lse_ref, delta_ref, lists, tokens, d_k_ref, d_v_ref,
    *, rules, blocks, u,
):  # fmt: skip
    k = k_ref[...]
    v = v_ref[...]
    program_rows = pl.ds(pl.program_id(0) * blocks.kept, blocks.kept)

    def one_head(head: Array, sums: Any) -> Any:
        def step(block: Array, sums: Any, is_masked: bool) -> Any:
            d_k, d_v = sums
            queries = pl.ds(block * blocks.passing, blocks.passing)
            q = q_ref[queries, head, :]
            d_out = d_out_ref[queries, head, :]
            logits = capped_logits(dot(k, q, 1, 1), rules)
            weights = jnp.exp2(logits - lse_ref[head, queries][None, :])
            if is_masked:
                weights = jnp.where(_mask(rules, tokens, u, queries, program_rows, 1), weights, 0.0)
            d_v = d_v + dot(weights.astype(d_out.dtype), d_out, 1, 0)
            d_logits = weights * (dot(v, d_out, 1, 1) - delta_ref[head, queries][None, :])
            slope = _slope(logits, rules)
            d_logits = d_logits if slope is None else d_logits * slope
            return d_k + dot(d_logits.astype(q.dtype), q, 1, 0), d_v

        return _through(lists, step, sums)

    sums = tuple(jnp.zeros(x.shape, jnp.float32) for x in (d_k_ref, d_v_ref))
    d_k, d_v = jax.lax.fori_loop(0, q_ref.shape[1], one_head, sums)
    d_k_ref[...] = rules.scale * d_k
    d_v_ref[...] = d_v


def attend(
    operands: AttentionOperands, *, interpret: bool = False
) -> tuple[Float[Array, "B S N Hv"], Float[Array, "B N S"]]:
    """Return what `pallas_kernels.flash_attention` returns."""
    blocks, _ = _block_sizes(*_widths(operands))
    out, lse = _call(_attend_kernel, operands, (), blocks, ("out", "lse"), interpret)
    s = operands.q.shape[1]
    hv = operands.v.shape[3]
    return out[:, :s, :, :hv], lse[:, :, :s]


def differentiate(
    operands: AttentionOperands, gradient: OutGradient, *, interpret: bool = False
) -> tuple[Array, Array, Array]:
    """Return the gradients defined in `pallas_kernels.flash_attention.kernels`."""
    (_, s, _, h), (_, u, _, hv) = operands.q.shape, operands.v.shape
    _, blocks = _block_sizes(*_widths(operands))
    # Weights are 0 where a query sees no key; -inf - -inf would be NaN.
    lse = jnp.where(jnp.isfinite(gradient.lse), gradient.lse, 0.0) * LOG2_E
    gradient = gradient._replace(lse=lse)
    (d_q,) = _call(_d_q_kernel, operands, gradient, blocks, ("d_q",), interpret)
    d_k, d_v = _call(_d_kv_kernel, operands, gradient, blocks, ("d_k", "d_v"), interpret)
    return d_q[:, :s, :, :h], d_k[:, :u, :, :h], d_v[:, :u, :, :hv]


def _widths(operands: AttentionOperands) -> tuple[int, int]:
    q, _, v, *_ = operands
    return _wide(max(q.shape[3], v.shape[3])), q.dtype.itemsize


def _call(
    kernel: Callable[..., None],
    operands: AttentionOperands,
    gradient: OutGradient | tuple[()],
    blocks: _AttentionBlocks,
    outputs: tuple[str, ...],
    interpret: bool,
) -> tuple[Array, ...]:
    """Run a kernel whose programs write blocks of queries, or of keys where `outputs` has "d_k"."""
    q, k, v, tokens, rules = operands
    sizes = _TritonSizes.of(q, k, v)
    by_key = "d_k" in outputs
    block_q, block_k = (blocks.passing, blocks.kept) if by_key else (blocks.kept, blocks.passing)
    kinds = kinds_of_blocks(rules, tokens, (sizes.s, sizes.u), (block_q, block_k))
    lists = list_visible(kinds.swapaxes(1, 2) if by_key else kinds)
    q = _fill(q, block_q)
    k = _fill(k, block_k)
    v = _fill(v, block_k)
    filled = _TritonSizes.of(q, k, v)
    group = sizes.n // sizes.m
    queries: Callable[[int], pl.BlockSpec] = functools.partial(_one_block, blocks.kept)
    keys: Callable[[int], pl.BlockSpec] = functools.partial(_all_keys, filled.u, group)
    per_query = _per_row(blocks.kept)
    grid = (filled.s // blocks.kept, sizes.b, sizes.n)
    if by_key:
        queries, keys = functools.partial(_all_queries, filled.s, group), queries
        per_query = pl.BlockSpec((None, group, filled.s), lambda i, b, m: (b, m, 0))
        grid = (filled.u // blocks.kept, sizes.b, sizes.m)
    arrays = [q, k, v]
    in_specs = [queries(filled.h), keys(filled.h), keys(filled.hv)]
    if gradient:
        numbers = (_fill_last(x, block_q) for x in (gradient.lse, gradient.delta))
        arrays += [_fill(gradient.d_out, block_q), *numbers]
        in_specs += [queries(filled.hv), per_query, per_query]
    tokens = _fill_tokens(tokens, block_q, block_k)
    results = {
        "out": (queries(filled.hv), (*q.shape[:3], filled.hv), q.dtype),
        "lse": (per_query, (sizes.b, sizes.n, filled.s), jnp.float32),
        "d_q": (queries(filled.h), q.shape, jnp.float32),
        "d_k": (keys(filled.h), k.shape, jnp.float32),
        "d_v": (keys(filled.hv), v.shape, jnp.float32),
    }
    like = (operands[:4], gradient)
    return pl.pallas_call(
        functools.partial(kernel, rules=rules, blocks=blocks, u=sizes.u),
        grid=grid,
        in_specs=[*in_specs, _list_specs(lists), _token_specs(tokens)],
        out_specs=[results[name][0] for name in outputs],
        out_shape=[shape_varying_like(*results[name][1:], *like) for name in outputs],
        compiler_params=_COMPILER(max(filled.h, filled.hv)),
        interpret=interpret,
        name="flash_attention" + kernel.__name__.removesuffix("_kernel").removeprefix("_attend"),
    )(*arrays, lists, tokens)


KERNELS = Kernels(attend, differentiate)
