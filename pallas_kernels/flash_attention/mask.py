# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Defines the attention mask and the records that carry it.

A query at position p of segment s sees a key at position t of segment r exactly when

    s == r                      if there are segments
    t <= p                      if causal
    abs(p - t) < window         if there is a window (with causal: the last `window` keys, its own
                                included; Hugging Face's sliding_window, and
                                local_window_size=(window - 1, 0) of jax.nn.dot_product_attention)

Positions are compared within a segment only, so they may restart at every document.

To add a rule: a field of `Rules` and its line in `sees`, both in
`pallas_kernels/flash_attention/mask.py`, its bounds in
`pallas_kernels/flash_attention/tpu/blocks.py` and
`pallas_kernels/flash_attention/visible_blocks.py`, a case in
`tests/pallas_kernels/flash_attention/test_flash_attention.py`.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp

from pallas_kernels.array_types import Array, Bool


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """Static part of attention; hashable, fixed at trace time."""

    causal: bool
    window: int | None
    softcap: float | None
    scale: float

    @classmethod
    def of(
        cls,
        name: str,
        q: Array,
        causal: bool,
        window: int | None,
        softcap: float | None,
        scale: float | None,
    ) -> "Rules":
        """Return the rules of a call.

        Args:
            name: Operation, for the message.
            q: Queries [B S N H].
            causal: Argument of flash_attention.
            window: Argument of flash_attention.
            softcap: Argument of flash_attention.
            scale: Argument of flash_attention; None is 1 / sqrt(H).

        Raises:
            ValueError: The window is less than 1, or the cap not above 0.
        """
        if window is not None and window < 1:
            raise ValueError(
                f"{name}: window={window} must be at least 1 (the query's own position), "
                "or None for no window."
            )
        if softcap is not None and softcap <= 0:
            raise ValueError(f"{name}: softcap={softcap} must be above 0, or None for no cap.")
        factor = q.shape[-1] ** -0.5 if scale is None else scale
        return cls(causal=causal, window=window, softcap=softcap, scale=factor)


class Tokens(NamedTuple):
    """Positions and segments of queries and keys: a pytree of [S], [U], [B S] or [B U] i32 arrays.

    Positions that are None count from 0; segment ids are both None or both given.
    """

    q_positions: Array | None
    kv_positions: Array | None
    q_segment_ids: Array | None
    kv_segment_ids: Array | None


def visible(
    rules: Rules,
    q_positions: Array,
    kv_positions: Array,
    q_segment_ids: Array | None,
    kv_segment_ids: Array | None,
) -> Bool[Array, "*B S U"]:
    """Return the mask from positions and segment ids whose last dimension is S or U."""
    return sees(
        rules,
        q_positions[..., :, None],
        kv_positions[..., None, :],
        None if q_segment_ids is None else q_segment_ids[..., :, None],
        None if kv_segment_ids is None else kv_segment_ids[..., None, :],
    )


def sees(
    rules: Rules,
    q_positions: Array,
    kv_positions: Array,
    q_segment_ids: Array | None,
    kv_segment_ids: Array | None,
) -> Bool[Array, "*shape"]:
    """Return the mask from arrays that broadcast against each other, such as [S 1] and [1 U]."""
    distance = q_positions - kv_positions
    is_visible = jnp.ones(distance.shape, bool)
    if rules.causal:
        is_visible &= distance >= 0
    if rules.window is not None:
        is_visible &= jnp.abs(distance) < rules.window
    if q_segment_ids is not None and kv_segment_ids is not None:
        is_visible = is_visible & (q_segment_ids == kv_segment_ids)
    return is_visible
