# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Checks the arguments of ring_attention and token_ring_attention.

To add a check: a function called by `check_call` of `pallas_kernels/ring/checks.py`, its message in
`tests/pallas_kernels/ring_attention/test_ring_attention.py`.
"""

import typing
from typing import NamedTuple

import jax
import numpy as np
from jax.core import Tracer

from pallas_kernels.array_types import Array
from pallas_kernels.backend import Implementation
from pallas_kernels.flash_attention.api import KERNELS, OPERATION, check_heads
from pallas_kernels.flash_attention.mask import Rules
from pallas_kernels.ring.step import AxisName, Links, Transport, check_transport
from pallas_kernels.sequence_layout import SequenceLayout


class Call(NamedTuple):
    """A checked call."""

    ranks: int
    """Number of ranks of the ring."""
    rules: Rules
    """Mask rules."""
    links: Links
    """Mesh axis, transport and implementation."""


def check_call(
    name: str,
    arrays: tuple[Array, Array, Array],
    tokens: tuple[Array | None, Array | None],
    mask: tuple[bool, int | None, float | None, float | None],
    axis_name: AxisName,
    layout: str,
    transport: str,
    implementation: Implementation | None,
) -> Call:
    """Return the static parts of a call.

    Args:
        name: Operation, for messages.
        arrays: q, k and v; all further arguments are those of `ring_attention`.
        tokens: positions and segment_ids.
        mask: causal, window, softcap and scale.
        axis_name: Mesh axis of the ring.
        layout: Layout of the tokens.
        transport: Transport of the parcels.
        implementation: Implementation of flash_attention.

    Raises:
        ValueError: Shapes, dtypes or options do not fit, or cannot run here.
    """
    q = arrays[0]
    positions = tokens[0]
    ranks = num_ranks(name, axis_name)
    check_arrays(name, *arrays)
    check_tokens(name, q, *tokens, ranks)
    rules = Rules.of(name, q, *mask)
    check_choice(name, "layout", layout, typing.get_args(SequenceLayout))
    check_layout(name, q.shape[1], ranks, layout)
    if rules.window is not None and layout == "document_zigzag" and positions is None:
        raise ValueError(
            f"{name}: window={rules.window} counts positions, and with layout='document_zigzag'"
            " those depend on the documents of the whole sequence: give positions, laid out by the"
            " order that laid out the tokens."
        )
    kernels = KERNELS[OPERATION.choose(implementation, *arrays[:3]).implementation]
    check_transport(name, transport, kernels)
    if transport == "remote_dma" and not isinstance(axis_name, str):
        raise ValueError(
            f"{name}: transport='remote_dma' needs one mesh axis, and axis_name={axis_name}: use"
            " transport='ppermute'."
        )
    return Call(ranks, rules, Links(axis_name, typing.cast(Transport, transport), kernels))


def check_choice(name: str, option: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise if an option has an unknown value."""
    if value not in choices:
        names = ", ".join(map(repr, choices))
        raise ValueError(f"{name}: {option}={value!r} must be one of {names}.")


def num_ranks(name: str, axis_name: AxisName) -> int:
    """Return the size of a mesh axis inside `jax.shard_map`; raise ValueError if it is unbound."""
    try:
        return jax.lax.axis_size(axis_name)
    except NameError as error:
        raise ValueError(
            f"{name}: axis_name={axis_name!r} must be a manual mesh axis, and there is none "
            "of that name: call it on local shards, inside a jax.shard_map over that axis."
        ) from error


def check_arrays(name: str, q: Array, k: Array, v: Array) -> None:
    """Raise if shapes or dtypes of a rank's queries, keys and values do not fit."""
    check_heads(name, q, k, v)
    if q.shape[1] != k.shape[1]:
        raise ValueError(
            f"{name}: q, k and v belong to the same tokens of this rank and must have the same"
            f" length, not q {q.shape}, k {k.shape}, v {v.shape}."
        )


def check_tokens(
    name: str, q: Array, positions: Array | None, segment_ids: Array | None, ranks: int
) -> None:
    """Raise if positions or segments have wrong shapes, or known positions are no permutation."""
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


def check_layout(name: str, width: int, ranks: int, layout: str) -> None:
    """Raise if a rank does not hold whole pieces."""
    if layout != "contiguous" and ranks > 1 and width % 2:
        raise ValueError(
            f"{name}: {width} tokens on each of {ranks} ranks are no two equal pieces: with layout"
            f"={layout!r} the length ({ranks * width}) must be divisible by {2 * ranks}: pad to"
            f" {ranks * (width + 1)}, or choose layout='contiguous'."
        )


def check_directions(name: str, directions: str, heads: int, form: str) -> None:
    """Raise if the heads of keys cannot be split between two directions."""
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
            " is on one side of it, and the other way round is longer: choose directions='one'."
        )
