# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Computes the largest logit of every query, which flash_attention does not return.

    max over the keys that a query sees of  scale * q k^T   (softcap * tanh(. / softcap) with a cap)

The log-sum-exp only bounds it: lse - log U <= top <= lse. It is exact and has no gradient. It costs
one more q k^T beside the seven products of a training step, in plain jax.numpy, and holds the
N * BLOCK * U scores of one block at a time: use it for monitoring.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import Array, Float, Float32, Int
from pallas_kernels.flash_attention.mask import Rules, visible

BLOCK = 128
"""Queries per block."""


def largest_logits(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B U M H"],
    *,
    causal: bool = True,
    q_positions: Int[Array, " S"] | Int[Array, "B S"] | None = None,
    kv_positions: Int[Array, " U"] | Int[Array, "B U"] | None = None,
    q_segment_ids: Int[Array, "B S"] | None = None,
    kv_segment_ids: Int[Array, "B U"] | None = None,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
) -> Float32[Array, "B N S"]:
    """Return the largest logit of every query that the softmax sees.

    Args:
        q: Queries, N heads.
        k: Keys, M heads; M divides N.
        causal: Whether a query sees no later key; all options are those of `flash_attention`.
        q_positions: Positions of the queries.
        kv_positions: Positions of the keys.
        q_segment_ids: Segments of the queries.
        kv_segment_ids: Segments of the keys.
        window: Distance from which keys are hidden.
        softcap: Bound of the logits.
        scale: Factor of the logits.

    Returns:
        The largest logits; -inf for a query that sees no key.
    """
    (b, s, n, h), (u, m) = q.shape, k.shape[1:3]
    rules = Rules.of("largest_logits", q, causal, window, softcap, scale)
    q, k = jax.lax.stop_gradient((q, k))
    block = min(BLOCK, s)
    blocks = -(-s // block)

    def by_block(x: Array) -> Array:
        """Reshape [B S ...] to [B blocks block ...], padded with zeros."""
        x = jnp.pad(x, [(0, 0), (0, blocks * block - s)] + [(0, 0)] * (x.ndim - 2))
        return x.reshape(b, blocks, block, *x.shape[2:])

    def whole(positions: Array | None, length: int) -> Array:
        positions = jnp.arange(length) if positions is None else positions
        return jnp.broadcast_to(positions, (b, length))

    queries = {"q": by_block(q.reshape(b, s, m, n // m, h))}
    queries["positions"] = by_block(whole(q_positions, s))
    keys = {"k": k, "positions": whole(kv_positions, u)}
    if q_segment_ids is not None and kv_segment_ids is not None:
        queries["segments"] = by_block(q_segment_ids)
        keys["segments"] = kv_segment_ids

    def one_block(keys: dict[str, Array], queries: dict[str, Array]) -> Float32[Array, "M g r"]:
        logits = jnp.einsum(
            "rmgh,umh->mgru", queries["q"], keys["k"], preferred_element_type=jnp.float32
        )
        is_visible = visible(
            rules,
            queries["positions"],
            keys["positions"],
            queries.get("segments"),
            keys.get("segments"),
        )
        return jnp.max(jnp.where(is_visible[None, None], logits * rules.scale, -jnp.inf), axis=-1)

    def one_sequence(sides: tuple[dict[str, Array], dict[str, Array]]) -> Array:
        queries, keys = sides
        return jax.lax.map(functools.partial(one_block, keys), queries)

    top = jax.lax.map(one_sequence, (queries, keys))  # B, blocks, M, g, block
    top = jnp.moveaxis(top, 1, 3).reshape(b, n, blocks * block)[:, :, :s]
    if softcap is None:
        return top
    return jnp.where(jnp.isneginf(top), top, softcap * jnp.tanh(top / softcap))
