# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The oracle of flash_attention: the masked softmax as it is written in books, all in float32.

    logits = scale * q k^T, softcap * tanh(logits / softcap) where there is a cap
    out    = softmax(logits over the visible keys) v
    lse    = log sum over the visible keys of exp(logits)

It stores the [B N S U] scores; the gradients are those that jax derives from these lines.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import Array, Float
from pallas_kernels.flash_attention.mask import Rules, Tokens, visible


def flash_attention(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B U M H"],
    v: Float[Array, "B U M Hv"],
    tokens: Tokens,
    rules: Rules,
) -> tuple[Float[Array, "B S N Hv"], Float[Array, "B N S"]]:
    """See `pallas_kernels.flash_attention`."""
    (b, s, n, _), (u, m) = q.shape, k.shape[1:3]
    q_positions = jnp.arange(s) if tokens.q_positions is None else tokens.q_positions
    kv_positions = jnp.arange(u) if tokens.kv_positions is None else tokens.kv_positions
    is_visible = visible(
        rules,
        jnp.broadcast_to(q_positions, (b, s)),
        jnp.broadcast_to(kv_positions, (b, u)),
        tokens.q_segment_ids,
        tokens.kv_segment_ids,
    )[:, None]  # [B 1 S U]
    k, v = (jnp.repeat(x, n // m, axis=2) for x in (k, v))  # one key head for each query head
    logits = rules.scale * jnp.einsum("bsnh,bunh->bnsu", q, k, preferred_element_type=jnp.float32)
    if rules.softcap is not None:
        logits = rules.softcap * jnp.tanh(logits / rules.softcap)
    logits = jnp.where(is_visible, logits, -jnp.inf)
    top = jnp.max(logits, axis=-1, keepdims=True)
    top = jax.lax.stop_gradient(jnp.where(jnp.isfinite(top), top, 0.0))
    weights = jnp.exp(logits - top)  # 0 where masked
    total = jnp.sum(weights, axis=-1, keepdims=True)
    # A query that sees nothing divides 0 by 1; the inner `where` keeps its gradient finite.
    sees_any = total > 0
    total = jnp.where(sees_any, total, 1.0)
    v = v.astype(jnp.float32)
    out = jnp.einsum("bnsu,bunh->bsnh", weights / total, v, preferred_element_type=jnp.float32)
    lse = jnp.where(sees_any, jnp.log(total) + top, -jnp.inf)
    return out.astype(q.dtype), lse[..., 0]
