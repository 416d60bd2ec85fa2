# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Checks shapes, dtypes and options of attention, whole or spread over ranks.

Every check takes the name of the called operation, for the message.
"""

import jax.numpy as jnp

from pallas_kernels.array_types import Array


def check_heads(name: str, q: Array, k: Array, v: Array) -> None:
    """Raise unless q [B S N H], k [B U M H] and v [B U M Hv] fit together.

    Args:
        name: Operation, for the message.
        q: Queries.
        k: Keys.
        v: Values.

    Raises:
        ValueError: Shapes or dtypes do not fit, or M does not divide N.
    """
    shapes = f"q {q.shape}, k {k.shape}, v {v.shape}"
    if (q.ndim, k.ndim, v.ndim) != (4, 4, 4):
        raise ValueError(f"{name} takes q [B S N H], k [B U M H] and v [B U M Hv], not {shapes}.")
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        raise ValueError(f"{name}: q, k and v must have the same batch, not {shapes}.")
    if q.shape[3] != k.shape[3]:
        raise ValueError(
            f"{name}: heads of q ({q.shape[3]} wide) and of k ({k.shape[3]}) must have "
            f"the same width, in {shapes}."
        )
    if k.shape[1:3] != v.shape[1:3]:
        raise ValueError(f"{name}: k and v must have the same length and heads, not {shapes}.")
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"{name}: the {q.shape[2]} heads of q must be a multiple of the "
            f"{k.shape[2]} heads of k, in {shapes}."
        )
    if not (q.dtype == k.dtype == v.dtype and jnp.issubdtype(q.dtype, jnp.floating)):
        raise ValueError(
            f"{name}: q, k and v must have the same floating dtype, not "
            f"{q.dtype}, {k.dtype} and {v.dtype}: cast with .astype."
        )


def check_tokens(
    name: str, side: str, heads: Array, positions: Array | None, segment_ids: Array | None
) -> None:
    """Raise unless positions are [S] or [B S] and segment ids [B S].

    Args:
        name: Operation, for the message.
        side: Prefix of the argument names: "q_", "kv_" or "".
        heads: Array [B S ...] of the tokens.
        positions: Positions of the tokens.
        segment_ids: Segments of the tokens.

    Raises:
        ValueError: They have other shapes.
    """
    b, length = heads.shape[:2]
    if positions is not None and positions.shape not in ((length,), (b, length)):
        raise ValueError(
            f"{name}: {side}positions {positions.shape} must be ({length},), the same "
            f"for every sequence, or ({b}, {length})."
        )
    if segment_ids is not None and segment_ids.shape != (b, length):
        raise ValueError(f"{name}: {side}segment_ids {segment_ids.shape} must be ({b}, {length}).")
