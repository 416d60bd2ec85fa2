# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule: a state that decays, and forgets what it held under a key it writes to.

    S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - (exp(g_t) S_{t-1})^T k_t)^T        [K V] per head
    o_t = S_t^T q_t

The logarithm g of the decay is a number per head, or one per row of the state (K of them). Value
heads share key heads in groups, as query heads share those of attention. Letters beside the
legend: N heads of values and states, M heads of keys, K width of a key, V width of a value.

In chunks (arXiv 2412.06464, section 3.3; per row: arXiv 2510.26692), with the sums c of g from the
beginning of a chunk, decays D_ij = exp(c_i - c_j) and the state S before the chunk,

    A_ij = beta_i k_i^T D_ij k_j     j < i
    W    = (1 + A)^-1 (beta v - beta (exp(c) k) S)               what is written
    o_i  = (exp(c_i) q_i)^T S + sum over j <= i of (q_i^T D_ij k_j) W_j
    S'   = exp(c_Q) S + sum over j of (D_Qj k_j) W_j^T

so that the only step that is sequential within a chunk is a triangular solve. Pairs of different
segments have D_ij = 0. A decay per row makes D_ij a diagonal matrix: exponents are differences
and never above 0, which factors exp(c_i) exp(-c_j) would not be.

Segments and `initial` are as in `pallas_kernels.selective_scan`. States, decays and solves are
float32. JAX derives the gradients; a chunk is computed again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from pallas_kernels.jax_versions import match_varying
from pallas_kernels.selective_scan.segments import find_segments

Form = Literal["reference", "chunks"]
"""One token after the other, or chunks of tokens."""


def delta_rule(
    q: Float[Array, "B S M K"],
    k: Float[Array, "B S M K"],
    v: Float[Array, "B S N V"],
    g: Float32[Array, "B S N *K"],
    beta: Float32[Array, "B S N"],
    *,
    segment_ids: Int[Array, "B S"] | None = None,
    initial: Float32[Array, "B N K V"] | None = None,
    chunk: int = 64,
    form: Form = "chunks",
) -> tuple[Float32[Array, "B S N V"], Float32[Array, "B N K V"]]:
    """Return the outputs of the gated delta rule, and the state after the last token.

    Args:
        q: Queries, scaled by the caller.
        k: Keys, of norm 1 for a state that stays bounded.
        v: Values; N is a multiple of M.
        g: Logarithm of the decays, not above 0: one per head, or one per row of the state.
        beta: Strength of writing, in [0, 1].
        segment_ids: Segment of each token, 0 for padding; None makes a row one segment.
        initial: State before the first token; None is 0.
        chunk: Tokens that are computed at once; the gradient stores one state per chunk.
        form: How it is computed.

    Returns:
        Outputs, 0 at padding, and the state after the last token that is not padding.

    Raises:
        ValueError: The heads of keys do not divide those of values.
    """
    batch, length, key_heads, key_dim = k.shape
    heads, value_dim = v.shape[2:]
    if heads % key_heads:
        raise ValueError(
            f"delta_rule: {heads} heads of values must be a multiple of {key_heads} heads of keys"
        )
    shape = (batch, heads, key_dim, value_dim)
    if initial is None:
        initial = jnp.zeros(shape, jnp.float32)
    segments = find_segments((batch, length), segment_ids)
    g, beta = segments.where_token(g), segments.where_token(beta)
    operands = match_varying(
        (q, k, v, g, beta, segments.index, initial), (q, k, v, g, beta, initial)
    )
    *arrays, index, state = operands
    if form == "reference" or length == 1:
        outputs, state = _over_tokens(tuple(arrays), index, state)
    else:
        outputs, state = _over_chunks(tuple(arrays), index, state, min(chunk, length))
    return segments.where_token(outputs), state


def _over_tokens(arrays: tuple[Array, ...], segments: Array, initial: Array) -> tuple[Array, Array]:
    """Return outputs and the last state, one token after the other."""
    group_size = arrays[2].shape[2] // arrays[1].shape[2]

    def step(carry, token):
        state, segment = carry
        (q, k, v, g, beta), token_segment = token
        q, k = (jnp.repeat(each, group_size, axis=1) for each in (q, k))
        decay = jnp.exp(g if g.ndim == 3 else g[..., None])
        state = jnp.where((token_segment == segment)[:, None, None, None], state, 0.0)
        state = decay[..., None] * state
        error = v - jnp.einsum("bnkv,bnk->bnv", state, k)
        state = state + (beta[..., None] * k)[..., None] * error[:, :, None, :]
        return (state, token_segment), jnp.einsum("bnkv,bnk->bnv", state, q)

    tokens = tuple(jnp.moveaxis(each.astype(jnp.float32), 1, 0) for each in arrays)
    first = jnp.zeros_like(segments[:, 0])
    (state, _), outputs = jax.lax.scan(step, (initial, first), (tokens, segments.swapaxes(0, 1)))
    return jnp.moveaxis(outputs, 0, 1), state


def _over_chunks(
    arrays: tuple[Array, ...], segments: Array, initial: Array, chunk: int
) -> tuple[Array, Array]:
    """Return outputs and the last state, one chunk after the other; the last one is padded."""
    batch, length = segments.shape
    number = -(-length // chunk)

    def cut(x: Array, mode: Any) -> Array:
        padding = ((0, 0), (0, number * chunk - length)) + ((0, 0),) * (x.ndim - 2)
        x = jnp.pad(x, padding, mode=mode)
        return jnp.moveaxis(x.reshape(batch, number, chunk, *x.shape[2:]), 1, 0)

    @jax.checkpoint
    def step(carry, part):
        state, before = carry
        arrays, segments = part
        state, outputs = _chunk(state, before, arrays, segments)
        return (state, segments[:, -1]), outputs

    chunks = (tuple(cut(x, "constant") for x in arrays), cut(segments, "edge"))
    first = jnp.zeros_like(segments[:, 0])
    (state, _), outputs = jax.lax.scan(step, (initial, first), chunks)
    outputs = jnp.moveaxis(outputs, 0, 1)
    return outputs.reshape(batch, number * chunk, *outputs.shape[3:])[:, :length], state


def _chunk(
    state: Array, before: Array, arrays: tuple[Array, ...], segments: Array
) -> tuple[Array, Array]:
    """Return the state after a chunk, and its outputs [B q N V].

    Args:
        state: State before the chunk.
        before: Segment of the token before it.
        arrays: q, k, v, g and beta.
        segments: Segment of each token.
    """
    q, k, v, g, beta = (_in_groups(x, arrays[1].shape[2]) for x in arrays)
    batch, length, groups, size, width = v.shape
    state = state.reshape(batch, groups, size, -1, width)
    per_row = g.ndim == 5
    sums = jnp.cumsum(g if per_row else g[..., None], axis=1)  # [B q M r K], or 1 for K
    end = sums[:, -1:]
    is_same = segments[:, :, None] == segments[:, None, :]
    continues = _as_factor(segments == before[:, None])
    is_last = _as_factor(segments == segments[:, -1:])
    k_own, q_own = k[:, :, :, 0], q[:, :, :, 0]
    pairs = _pairs_by_row if per_row else _pairs_by_head
    of_keys, of_queries = pairs(k_own, q_own, sums, is_same)
    beta = jnp.moveaxis(beta, 1, 3)[..., None]  # [B M r q 1]
    entering = jnp.moveaxis(continues * jnp.exp(sums) * k.astype(jnp.float32), 1, 3)
    errors = jnp.moveaxis(v.astype(jnp.float32), 1, 3) - entering @ state
    unit = jnp.eye(length, dtype=jnp.float32)[None, None, None]
    lower = unit + jnp.tril(beta * of_keys, -1)
    written = jax.scipy.linalg.solve_triangular(
        lower, beta * errors, lower=True, unit_diagonal=True
    )
    reading = jnp.moveaxis(continues * jnp.exp(sums) * q.astype(jnp.float32), 1, 3)
    outputs = reading @ state + jnp.tril(of_queries) @ written
    to_end = jnp.moveaxis(is_last * jnp.exp(end - sums) * k.astype(jnp.float32), 1, 3)
    carried = jnp.moveaxis(continues[:, -1:] * jnp.exp(end), 1, 3)[..., 0, :, None]
    state = carried * state + jnp.swapaxes(to_end, -1, -2) @ written
    outputs = jnp.moveaxis(outputs, 3, 1).reshape(batch, length, groups * size, width)
    return state.reshape(batch, groups * size, -1, width), outputs


def _pairs_by_head(
    k: Float[Array, "B q M K"],
    q: Float[Array, "B q M K"],
    sums: Float32[Array, "B q M r 1"],
    is_same: Array,
) -> tuple[Float32[Array, "B M r q q"], Float32[Array, "B M r q q"]]:
    """Return k_i^T D_ij k_j and q_i^T D_ij k_j of the pairs j <= i, for one decay per head."""
    sums = jnp.moveaxis(sums[..., 0], 1, 3)
    decay = _decay(sums[..., :, None] - sums[..., None, :], is_same[:, None, None])
    product = _product("bimk,bjmk->bmij")
    return product(k, k)[:, :, None] * decay, product(q, k)[:, :, None] * decay


def _pairs_by_row(
    k: Float[Array, "B q M K"],
    q: Float[Array, "B q M K"],
    sums: Float32[Array, "B q M r K"],
    is_same: Array,
) -> tuple[Float32[Array, "B M r q q"], Float32[Array, "B M r q q"]]:
    """Return the same for one decay per row of the state."""
    sums = jnp.moveaxis(sums, 1, 3)
    decay = _decay(sums[..., :, None, :] - sums[..., None, :, :], is_same[:, None, None, ..., None])
    k, q = (x.astype(jnp.float32) for x in (k, q))
    product = _product("bimk,bjmk,bmrijk->bmrij")
    return product(k, k, decay), product(q, k, decay)


def _decay(exponent: Array, is_same: Array) -> Array:
    """Return exp of the exponents of pairs j <= i of one segment, 0 of others.

    Exponents of others may overflow, and are replaced before and after.
    """
    length = is_same.shape[3]
    shape = (1, 1, 1, length, length) + (1,) * (exponent.ndim - 5)
    is_seen = is_same & jnp.tri(length, dtype=bool).reshape(shape)
    return jnp.where(is_seen, jnp.exp(jnp.where(is_seen, exponent, 0.0)), 0.0)


def _product(subscripts: str) -> Callable[..., Array]:
    def multiply(*arrays: Array) -> Array:
        return jnp.einsum(subscripts, *arrays, preferred_element_type=jnp.float32)

    return multiply


def _in_groups(x: Array, groups: int) -> Array:
    """Return [B q M r ...], of one r where heads are those of keys."""
    return x.reshape(*x.shape[:2], groups, -1, *x.shape[3:])


def _as_factor(mask: Array) -> Array:
    return mask.astype(jnp.float32)[:, :, None, None, None]
