# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Reference of flash_attention: the masked softmax, in float32.

    logits = scale * q k^T, softcap * tanh(logits / softcap) where there is a cap
    out    = softmax(logits over the visible keys) v
    lse    = log sum over the visible keys of exp(logits)

It stores the [B N S U] scores; JAX derives the gradients.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import Array, Float
from pallas_kernels.flash_attention.kernels import AttentionOperands, Kernels, OutGradient
from pallas_kernels.flash_attention.mask import Rules, Tokens, visible


def flash_attention(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B U M H"],
    v: Float[Array, "B U M Hv"],
    tokens: Tokens,
    rules: Rules,
) -> tuple[Float[Array, "B S N Hv"], Float[Array, "B N S"]]:
    """Return what `pallas_kernels.flash_attention` returns."""
    logits = _logits(q, k, tokens, rules)
    top = jnp.max(logits, axis=-1, keepdims=True)
    top = jax.lax.stop_gradient(jnp.where(jnp.isfinite(top), top, 0.0))
    weights = jnp.exp(logits - top)  # 0 where masked
    total = jnp.sum(weights, axis=-1, keepdims=True)
    # A query that sees nothing divides 0 by 1; the inner `where` keeps its gradient finite.
    sees_any = total > 0
    total = jnp.where(sees_any, total, 1.0)
    v = _repeat(v.astype(jnp.float32), q)
    out = jnp.einsum("bnsu,bunh->bsnh", weights / total, v, preferred_element_type=jnp.float32)
    lse = jnp.where(sees_any, jnp.log(total) + top, -jnp.inf)
    return out.astype(q.dtype), lse[..., 0]


def differentiate(operands: AttentionOperands, gradient: OutGradient) -> tuple[Array, Array, Array]:
    """Return the gradients defined in `pallas_kernels.flash_attention.kernels`.

    out' = exp(logits - lse) v is pulled back from d_out through v, and from P (d_out v^T - delta)
    through the logits.
    """
    *arrays, tokens, rules = operands
    d_out, lse, delta = gradient
    q, k, v, d_out = (x.astype(jnp.float32) for x in (*arrays, d_out))
    logits, pull = jax.vjp(lambda q, k: _logits(q, k, tokens, rules), q, k)
    lse = jnp.where(jnp.isfinite(lse), lse, 0.0)
    weights = jnp.exp(logits - lse[..., None])
    d_weights = jnp.einsum("bsnh,bunh->bnsu", d_out, _repeat(v, q))
    d_q, d_k = pull(weights * (d_weights - delta[..., None]))
    _, pull_v = jax.vjp(lambda v: jnp.einsum("bnsu,bunh->bsnh", weights, _repeat(v, q)), v)
    return d_q, d_k, *pull_v(d_out)


def _logits(q: Array, k: Array, tokens: Tokens, rules: Rules) -> Array:
    """Return logits [B N S U], -inf where a query does not see a key."""
    (b, s), u = q.shape[:2], k.shape[1]
    q_positions = jnp.arange(s) if tokens.q_positions is None else tokens.q_positions
    kv_positions = jnp.arange(u) if tokens.kv_positions is None else tokens.kv_positions
    is_visible = visible(
        rules,
        jnp.broadcast_to(q_positions, (b, s)),
        jnp.broadcast_to(kv_positions, (b, u)),
        tokens.q_segment_ids,
        tokens.kv_segment_ids,
    )[:, None]  # [B 1 S U]
    k = _repeat(k, q)
    logits = rules.scale * jnp.einsum("bsnh,bunh->bnsu", q, k, preferred_element_type=jnp.float32)
    if rules.softcap is not None:
        logits = rules.softcap * jnp.tanh(logits / rules.softcap)
    return jnp.where(is_visible, logits, -jnp.inf)


def _repeat(x: Array, q: Array) -> Array:
    """Return one key or value head per query head."""
    return jnp.repeat(x, q.shape[2] // x.shape[2], axis=2)


KERNELS = Kernels(lambda operands: flash_attention(*operands), differentiate)
