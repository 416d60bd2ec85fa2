# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Implements state_space_dual for TPUs: a Mosaic kernel of the forward pass.

The grid is (sequence, block of heads, chunk of 128 tokens). The formulas are those of ../xla.py,
with tokens along the lanes, so that factors of tokens are rows and half a register is not left
empty by heads of 64:

    S[j, i]  = b[j] . c[i]                                        once for all heads of a block
    y[:, i]  = sum over j of (dt[j] x[:, j]) (S exp(l[i] - l[j]))  +  carried[i] h c[i]
    h        = carried[Q] h  +  sum over j of (kept[j] x[:, j]) b[j]^T
    carried  = exp(l), 0 behind the first border     kept = exp(l[Q] - l) dt, 0 before the last one

The state h stays in VMEM over the chunks, in float32: it is the block of the result. Factors of
products have the dtype of x; float32 takes the exact passes of the MXU.

The backward pass is that of ../xla.py, which runs its forward pass again and stores one state per
`chunk`. Rows of fewer than 8 tokens (decoding) are computed by ../xla.py: a tile would be mostly
padding. Call it on local arrays, in a `jax.shard_map`: an array sharded by the compiler is gathered
first.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.array_types import Array, Float, Float32, Int
from pallas_kernels.flash_attention.tpu.tiles import LANES, column, dot
from pallas_kernels.jax_versions import match_varying, shape_varying_like
from pallas_kernels.selective_scan import xla

TOKENS = LANES
"""Tokens of a tile."""
FEWEST = 8
"""Tokens of the shortest row that the kernel takes."""
HEADS = 8
"""Most heads of a step: they share the product of b and c, and each adds its code."""


def state_space_dual(
    x: Float[Array, "B S N H"],
    dt: Float32[Array, "B S N"],
    decay: Float32[Array, " N"],
    b: Float[Array, "B S M P"],
    c: Float[Array, "B S M P"],
    segments: Int[Array, "B S"],
    initial: Float32[Array, "B N H P"],
    *,
    chunk: int,
) -> tuple[Float[Array, "B S N H"], Float32[Array, "B N H P"]]:
    """Return what `pallas_kernels.state_space_dual` returns; arguments as in ../reference.py.

    `chunk` is that of the backward pass.
    """
    if x.shape[1] < FEWEST or 0 in (*x.shape, *b.shape):
        return xla.state_space_dual(x, dt, decay, b, c, segments, initial, chunk=chunk)
    return _scan(chunk, x, dt, decay, b, c, segments, initial)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scan(chunk: int, *arrays: Array) -> tuple[Array, Array]:
    del chunk
    return _run(*arrays)


def _forward(chunk, *arrays):
    return _scan(chunk, *arrays), arrays


def _backward(chunk, arrays, d_results):
    *floating, segments, initial = arrays

    def scan(x, dt, decay, b, c, initial):
        return xla.state_space_dual(x, dt, decay, b, c, segments, initial, chunk=chunk)

    _, pull = jax.vjp(scan, *floating, initial)
    *gradients, d_initial = pull(d_results)
    return *gradients, None, d_initial


_scan.defvjp(_forward, _backward)


def _run(
    x: Array, dt: Array, decay: Array, b: Array, c: Array, segments: Array, initial: Array
) -> tuple[Array, Array]:
    batch, length, heads, width = x.shape
    groups, numbers = b.shape[2:]
    shared = heads // groups
    together = next(k for k in range(min(HEADS, shared), 0, -1) if shared % k == 0)
    chunks = -(-length // TOKENS)
    padded = chunks * TOKENS

    def pad(array: Array, mode: str = "constant") -> Array:
        widths = ((0, 0), (0, padded - length)) + ((0, 0),) * (array.ndim - 2)
        return jnp.pad(array, widths, mode=mode)

    segments = pad(segments, "edge")
    factors = _factors(pad(dt), decay, segments)  # [B 4 S N]
    factors = jnp.moveaxis(factors, 2, 3).reshape(batch, 4, heads // together, together, padded)
    token_spec = pl.BlockSpec((None, together, width, TOKENS), lambda b, n, q: (b, n, 0, q))
    group = pl.BlockSpec(
        (None, None, TOKENS, numbers), lambda b, n, q: (b, n * together // shared, q, 0)
    )
    state = pl.BlockSpec((None, together, width, numbers), lambda b, n, q: (b, n, 0, 0))
    arrays = (
        jnp.transpose(pad(x), (0, 2, 3, 1)),
        factors,
        *(jnp.swapaxes(pad(each), 1, 2) for each in (b, c)),
        segments[:, None],
        initial,
    )
    arrays = match_varying(arrays, arrays)
    tiles = batch * heads * chunks
    y, last = pl.pallas_call(
        functools.partial(_kernel, heads=together),
        grid=(batch, heads // together, chunks),
        in_specs=[
            token_spec,
            pl.BlockSpec((None, 4, None, together, TOKENS), lambda b, n, q: (b, 0, n, 0, q)),
            group,
            group,
            pl.BlockSpec((None, 1, TOKENS), lambda b, n, q: (b, 0, q)),
            state,
        ],
        out_specs=[token_spec, state],
        out_shape=[
            shape_varying_like((batch, heads, width, padded), x.dtype, arrays),
            shape_varying_like(initial.shape, jnp.float32, arrays),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * tiles * TOKENS * (TOKENS * (width + numbers) + 2 * width * numbers),
            transcendentals=tiles * TOKENS * TOKENS,
            bytes_accessed=(2 * arrays[0].size + 2 * arrays[2].size) * x.dtype.itemsize
            + 4 * factors.size,
        ),
        name="state_space_dual",
    )(*arrays)
    return jnp.transpose(y, (0, 3, 1, 2))[:, :length], last


def _factors(dt: Array, decay: Array, segments: Array) -> Float32[Array, "B 4 S N"]:
    """Return dt, the sums l, `carried` and `to_end` of every token."""

    def cut(array: Array) -> Array:
        return array.reshape(array.shape[0], -1, TOKENS, *array.shape[2:])

    steps = cut(dt)
    segment = cut(segments)[..., None]
    sums = jnp.cumsum(steps * decay[None, None, None], axis=2)
    last = segment[:, :, -1:]
    before = jnp.pad(last[:, :-1], ((0, 0), (1, 0), (0, 0), (0, 0)))
    carried = jnp.where(segment == before, jnp.exp(sums), 0.0)
    to_end = jnp.where(segment == last, jnp.exp(sums[:, :, -1:] - sums) * steps, 0.0)
    return jnp.stack([each.reshape(dt.shape) for each in (steps, sums, carried, to_end)], axis=1)


def _kernel(
    x: Any, factors: Any, b: Any, c: Any, segments: Any, initial: Any, y: Any, state: Any, *, heads
) -> None:
    @pl.when(pl.program_id(2) == 0)
    def _():
        state[...] = initial[...]

    square = (TOKENS, TOKENS)
    is_read = jax.lax.broadcasted_iota(jnp.int32, square, 0) <= jax.lax.broadcasted_iota(
        jnp.int32, square, 1
    )
    segment = segments[...]
    is_read &= column(segment) == segment
    scores = dot(b[...], c[...], ((1,), (1,)))
    for head in range(heads):
        steps, sums, carried, to_end = (factors[i, head : head + 1, :] for i in range(4))
        exponents = jnp.where(is_read, sums - column(sums), -jnp.inf)
        weights = (scores * jnp.exp(exponents)).astype(c.dtype)
        before = state[head]
        inputs = x[head].astype(jnp.float32)
        read = dot(before.astype(c.dtype), c[...], ((1,), (1,)))
        within = dot((inputs * steps).astype(c.dtype), weights, ((1,), (0,)))
        y[head] = (within + carried * read).astype(y.dtype)
        added = dot((inputs * to_end).astype(b.dtype), b[...], ((1,), (0,)))
        state[head] = carried[:, TOKENS - 1 :] * before + added
