# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Defines the records of paged attention, and checks shapes, dtypes and options."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp

from pallas_kernels.array_types import Array, Float, Int
from pallas_kernels.backend import Implementation
from pallas_kernels.quantized_array import QuantizedArray

Pool = Float[Array, "L P G M 2 H"] | QuantizedArray
"""Pages of all layers; the scales of few bits have as many dimensions, grouped along H."""


class Tables(NamedTuple):
    """Pages of each sequence, in order; entries that are not used are any page."""

    singles: Int[Array, "R W"]
    """Sequences with one query."""
    pieces: Int[Array, "p W"]
    """Sequences with C queries."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PagedRules:
    """Static part of a call; hashable."""

    window: int | None
    softcap: float | None
    scale: float
    requested: Implementation | None
    """Implementation that was asked for; what gathers pages asks `flash_attention` for it."""
    returns_lse: bool = False
    """Whether the log-sum-exp is returned beside the output."""
    chunk: int | None = None
    """Positions of a chunk, whose queries see no other."""


def rules_of(
    q: Array,
    window: int | None,
    softcap: float | None,
    scale: float | None,
    implementation: Implementation | None,
    returns_lse: bool = False,
    chunk: int | None = None,
) -> PagedRules:
    """Return the rules of a call.

    Args:
        q: Queries [T N H].
        window: Argument of paged_attention.
        softcap: Argument of paged_attention.
        scale: Argument of paged_attention; None is 1 / sqrt(H).
        implementation: Argument `implementation` of paged_attention.
        returns_lse: Argument of paged_attention.
        chunk: Argument of paged_attention.

    Raises:
        ValueError: The window or the chunk is less than 1, or the cap not above 0.
    """
    if chunk is not None and chunk < 1:
        raise ValueError(f"paged_attention: chunk={chunk} must be at least 1, or None for none.")
    if window is not None and window < 1:
        raise ValueError(
            f"paged_attention: window={window} must be at least 1 (the query's own position), "
            "or None for no window."
        )
    if softcap is not None and softcap <= 0:
        raise ValueError(f"paged_attention: softcap={softcap} must be above 0, or None for no cap.")
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    return PagedRules(
        window=window,
        softcap=softcap,
        scale=factor,
        requested=implementation,
        returns_lse=returns_lse,
        chunk=chunk,
    )


def check_arguments(q: Array, pool: Pool, tables: Tables, positions: Array) -> None:
    """Raise unless the arguments of paged_attention fit together.

    Args:
        q: Queries.
        pool: Pages of all layers.
        tables: Pages of the sequences.
        positions: Positions of the queries.

    Raises:
        ValueError: They do not.
    """
    if q.ndim != 3 or pool.ndim != 6 or pool.shape[4] != 2:
        raise ValueError(
            "paged_attention takes q [T N H] and a pool [L P G M 2 H], not "
            f"q {q.shape} and a pool {pool.shape}."
        )
    if q.shape[2] != pool.shape[5] or q.shape[1] % pool.shape[3]:
        raise ValueError(
            f"paged_attention: heads of q {q.shape} and of the pool {pool.shape} must be as wide, "
            "and those of q a multiple of those of the pool."
        )
    if not jnp.issubdtype(q.dtype, jnp.floating):
        raise ValueError(f"paged_attention: q must be floating, not {q.dtype}: cast with .astype.")
    (singles, width), (pieces, piece_width) = tables.singles.shape, tables.pieces.shape
    num_pieces = q.shape[0] - singles
    if singles and pieces and width != piece_width:
        raise ValueError(
            f"paged_attention: singles and pieces must be as wide, not {width} and {piece_width}."
        )
    if positions.shape != q.shape[:1] or (num_pieces % pieces if pieces else num_pieces):
        raise ValueError(
            f"paged_attention: {singles} singles and {pieces} pieces of equal length do not make "
            f"the {q.shape[0]} queries and {positions.shape} positions."
        )


def num_queries(q: Array, tables: Tables) -> int:
    """Return the number of queries of a piece; 0 without pieces.

    Args:
        q: Queries.
        tables: Pages of the sequences.
    """
    pieces = tables.pieces.shape[0]
    return (q.shape[0] - tables.singles.shape[0]) // pieces if pieces else 0
