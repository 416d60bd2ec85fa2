# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Numbers the segments of a row from their ids, with padding left out."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import Array, Bool, Int


class Segments(NamedTuple):
    """Segments of all tokens."""

    index: Int[Array, "B S"]
    """Number of segments that began after the first one, up to and with the token: never falls.
    Padding has the number of the token before it."""
    is_token: Bool[Array, "B S"] | None
    """False at padding; None where there is none."""

    def where_token(self, x: Array) -> Array:
        """Return [B S ...] with 0 at padding."""
        if self.is_token is None:
            return x
        is_token = jnp.expand_dims(self.is_token, tuple(range(2, x.ndim)))
        return jnp.where(is_token, x, jnp.zeros((1,) * x.ndim, x.dtype))


def find_segments(shape: tuple[int, ...], segment_ids: Int[Array, "B S"] | None) -> Segments:
    """Return the segments.

    Args:
        shape: Sequences and tokens.
        segment_ids: Ids, 0 for padding; None for one segment per row without padding.
    """
    if segment_ids is None:
        return Segments(jnp.zeros(shape, jnp.int32), None)
    is_token = segment_ids != 0
    place = jnp.where(is_token, jnp.arange(shape[1], dtype=jnp.int32)[None], jnp.int32(-1))
    latest = jax.lax.cummax(place, axis=1)
    before = jnp.pad(latest[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    id_before = jnp.take_along_axis(segment_ids, jnp.maximum(before, 0), axis=1)
    begins = is_token & (before >= 0) & (id_before != segment_ids)
    return Segments(jnp.cumsum(begins, axis=1, dtype=jnp.int32), is_token)
