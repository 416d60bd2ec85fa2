# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""What ring attention and token-ring attention refuse, in words.

To add a rule: a function here, called by the door, and its message in the tests.
"""

import jax
import numpy as np
from jax.core import Tracer

from pallas_kernels.array_types import Array
from pallas_kernels.flash_attention.arguments import check_heads
from pallas_kernels.sequence_layout import SequenceLayout


def num_ranks(name: str, axis_name: str) -> int:
    """Of a mesh axis, inside `jax.shard_map`; or words instead of an unbound name."""
    try:
        return jax.lax.axis_size(axis_name)
    except NameError as error:
        raise ValueError(
            f"{name}: axis_name={axis_name!r} must be a manual mesh axis, and here is none of that "
            "name: call it on local shards, inside a jax.shard_map over that axis."
        ) from error


def check_arrays(name: str, q: Array, k: Array, v: Array) -> None:
    """Shapes and dtypes of a rank's queries, keys and values."""
    check_heads(name, q, k, v)
    if q.shape[1] != k.shape[1]:
        raise ValueError(
            f"{name}: q, k and v are of the same tokens of this rank and must have the same length,"
            f" not q {q.shape}, k {k.shape}, v {v.shape}."
        )


def check_tokens(
    name: str, q: Array, positions: Array | None, segment_ids: Array | None, ranks: int
) -> None:
    """Shapes of positions and segments; and whether positions that are known are possible."""
    b, width = q.shape[:2]
    if segment_ids is not None and segment_ids.shape != (b, width):
        raise ValueError(
            f"{name}: segment_ids {segment_ids.shape} must be ({b}, {width}), those of this rank."
        )
    if positions is None:
        return
    if positions.shape not in ((width,), (b, width)):
        raise ValueError(
            f"{name}: positions {positions.shape} must be ({width},), the same for every sequence,"
            f" or ({b}, {width}), those of this rank."
        )
    if isinstance(positions, Tracer) or segment_ids is not None:
        return
    for row in np.asarray(positions).reshape(-1, width):
        values, times = np.unique(row, return_counts=True)
        if ranks > 1 or times.max(initial=1) > 1:
            raise ValueError(
                f"{name}: positions are no permutation of the {ranks * width} tokens that"
                f" {ranks} ranks hold: position {values[times.argmax()]} is there"
                f" {ranks * times.max()} times. Pass the order of sequence_order through shard_map"
                " like the tokens, so that every rank has its own part; or give segment_ids where"
                " positions restart."
            )


def check_layout(name: str, width: int, ranks: int, layout: SequenceLayout) -> None:
    """A rank must hold whole pieces."""
    if layout != "contiguous" and ranks > 1 and width % 2:
        raise ValueError(
            f"{name}: {width} tokens on each of {ranks} ranks are no two equal pieces: with layout"
            f"={layout!r} the length ({ranks * width}) must be divisible by {2 * ranks}: pad to"
            f" {ranks * (width + 1)}, or choose layout='contiguous'."
        )


def check_directions(name: str, directions: str, heads: int, form: str) -> None:
    """Half of the heads of keys must be a whole number."""
    if directions == "one":
        return
    if heads % 2:
        raise ValueError(
            f"{name}: directions='both' sends half of the heads of k each way, and k has {heads} on"
            " a rank: choose directions='one', or an even number."
        )
    if form == "near":
        raise ValueError(
            f"{name}: directions='both' with a window on layout='contiguous': what a query sees"
            " lies on one side of it, and the other way round is longer; choose directions='one'."
        )
