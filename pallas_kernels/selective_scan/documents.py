# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Numbers the documents of a row, for recurrences that forget at each border."""

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import Array, Float, Int


def number_documents(
    segment_ids: Int[Array, "B S"] | None, step: Float[Array, "B S _"]
) -> tuple[Int[Array, "B S"], Float[Array, "B S _"]]:
    """Return the number of each position's document, and the steps without those of padding.

    Padding belongs to the document before it, or at the start of a row to the one after it, and
    has a step of 0: it neither forgets nor writes.

    Args:
        segment_ids: Document of each position, 0 for padding; one document a row when None.
        step: Steps of the recurrence.
    """
    if segment_ids is None:
        return jnp.zeros(step.shape[:2], jnp.int32), step
    is_real = segment_ids != 0
    places = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)[None]
    latest = jax.lax.cummax(jnp.where(is_real, places, -1), axis=1)
    first = jnp.argmax(is_real, axis=1).astype(jnp.int32)[:, None]
    source = jnp.where(latest < 0, first, latest)
    ids = jnp.take_along_axis(segment_ids, source, axis=1, mode="clip")
    is_new = jnp.pad(ids[:, 1:] != ids[:, :-1], ((0, 0), (1, 0)))
    numbers = jnp.cumsum(is_new, axis=1, dtype=jnp.int32)
    return numbers, jnp.where(is_real[..., None], step, jnp.zeros_like(step))
