# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Computes the cross-entropy of single tokens, in nats.

nll = logsumexp(z) - z[target]
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmoe.models.embedding import vocabulary_ids


def token_nll(
    logits: Float[Array, "B S V"], targets: Int[Array, "B S"], *, axes: tuple[str, ...] = ()
) -> Float[Array, "B S"]:
    """Return the negative log-likelihood of each target in nats, f32.

    Args:
        logits: Logits in f32; those of the local shard if the vocabulary is sharded.
        targets: Ids in [0, V) of the whole vocabulary.
        axes: Mesh axes over which the vocabulary is sharded; three numbers per token are reduced.
    """
    # A masked sum instead of a gather: its gradient is elementwise, and V may be sharded.
    is_target = vocabulary_ids(logits, axes) == targets[:, :, None]
    chosen = jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
    if not axes:
        return jax.nn.logsumexp(logits, axis=-1) - chosen
    top = jax.lax.pmax(jax.lax.stop_gradient(jnp.max(logits, axis=-1)), axes)
    total = jnp.sum(jnp.exp(logits - top[:, :, None]), axis=-1)
    total, chosen = jax.lax.psum((total, chosen), axes)
    return top + jnp.log(total) - chosen
