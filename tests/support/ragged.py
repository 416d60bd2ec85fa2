# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Reference of `jax.lax.ragged_all_to_all` for the CPU, which lacks it."""

import jax
import jax.numpy as jnp


def ragged_all_to_all(
    operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name
):
    """Same arguments and result; slices that overlap, or sizes that disagree, give NaN."""
    me, devices = jax.lax.axis_index(axis_name), jax.lax.axis_size(axis_name)
    rows, begin, count, lands = jax.lax.all_gather(
        (operand, input_offsets, send_sizes, output_offsets), axis_name
    )
    each = begin.shape[1] // devices  # slices from each device to each other one
    begin, count, lands = (
        jax.lax.dynamic_slice_in_dim(table, me * each, each, axis=1).reshape(-1)
        for table in (begin, count, lands)
    )
    place = jnp.arange(output.shape[0], dtype=jnp.int32)
    ends = lands + count
    covers = (lands[:, None] <= place[None]) & (place[None] < ends[:, None])  # slice, place
    slice_of = covers.argmax(0)
    found = rows[slice_of // each, begin[slice_of] + place - lands[slice_of]]
    result = jnp.where(covers.any(0)[:, None], found, output)
    is_right = (covers.sum(0) <= 1).all() & (count == recv_sizes).all()
    return jnp.where(is_right, result, jnp.asarray(jnp.nan, result.dtype))
