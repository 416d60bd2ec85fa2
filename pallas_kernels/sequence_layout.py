# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Assigns the tokens of a sequence to the ranks of a mesh axis.

In a causal sequence late tokens see more keys than early ones, so that equal pieces are unequal
work. With N ranks:

    contiguous        rank r holds the r-th of N pieces; the last one works 2 - 1/N times the mean
    zigzag            of 2N pieces rank r holds r and 2N - 1 - r: equal work
    document_zigzag   the same per document: equal work where documents are packed

A document of L tokens has 2N pieces of L // 2N tokens; the remaining L % 2N tokens make as many
pieces one longer. The longer pieces continue cyclically across documents, so that every rank holds
exactly S / N tokens for any lengths, S / 2N of them in low pieces (below N) and as many in high
ones. Padding is a document like any other. Work is equal where 2N divides every length; else a rank
may be 2L scores off its L^2 / 2N in a document of L tokens, a part 4N / L. Over many documents the
signs differ: 0.3% for 8 ranks and 4096 tokens in documents of about 200.

In the two zigzag layouts a rank holds [low pieces | high pieces]; the low tokens of a document come
before all its high tokens of any rank, low ones of rank r before those of rank r + 1, high ones
after those. Ring attention relies on this order (Llama 3, arXiv 2407.21783, section 3.3.2; per
document: ByteScale, arXiv 2502.21231).

Everything that belongs to tokens is laid out by the same order: ids, labels, positions, segments,
masks.

To add a layout: its name in `SequenceLayout` and its order in `sequence_order`, both in
`pallas_kernels/sequence_layout.py`, a row in `tests/pallas_kernels/test_sequence_layout.py`.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.array_types import Array, Int, Shaped

SequenceLayout = Literal["contiguous", "zigzag", "document_zigzag"]


def sequence_order(
    length: int,
    ranks: int,
    layout: SequenceLayout = "zigzag",
    segment_ids: Int[Array, "*B S"] | Int[np.ndarray, "*B S"] | None = None,
) -> Int[Array, "*C S"] | Int[np.ndarray, "*C S"]:
    """Return the token at each sharded position: rank r holds the r-th of `ranks` equal parts.

    Args:
        length: Length of the sequence.
        ranks: Number of devices that share it.
        layout: Layout of the tokens.
        segment_ids: Segments of the tokens, in the order of the sequence, for document_zigzag; a
            document is all tokens of one id. None is one document. Other layouts ignore them.

    Returns:
        A permutation: `x[order]` is laid out, and `argsort(order)` is its inverse. With
        document_zigzag it has a row per row of segment ids; see `lay_out`.

    Raises:
        ValueError: The length does not divide, or differs from that of the segment ids.
    """
    pieces = ranks if layout == "contiguous" else 2 * ranks
    if length % pieces:
        raise ValueError(
            f"sequence_order: length={length} must be divisible by {pieces}"
            f" ({layout} over {ranks} ranks): pad to {padded_length(length, ranks, layout)}"
        )
    if layout == "document_zigzag" and segment_ids is not None:
        if segment_ids.shape[-1] != length:
            raise ValueError(
                f"sequence_order: segment_ids {segment_ids.shape} must have length={length} in the"
                " last dimension: give those of the whole sequence, in its own order"
            )
        rows = segment_ids.reshape(-1, length)
        if isinstance(segment_ids, np.ndarray):
            orders = np.stack([_by_document(row, ranks, np) for row in rows])
        else:
            orders = jax.vmap(lambda row: _by_document(row, ranks, jnp))(rows)
        return orders.reshape(segment_ids.shape)
    parts = np.arange(length, dtype=np.int32).reshape(pieces, -1)
    if layout != "contiguous":
        parts = np.stack([parts[:ranks], parts[: ranks - 1 : -1]], axis=1)
    return parts.reshape(length)


def lay_out(
    x: Shaped[Array, "..."] | Shaped[np.ndarray, "..."],
    order: Int[Array, "*B S"] | Int[np.ndarray, "*B S"],
    axis: int = 1,
) -> Shaped[Array, "..."]:
    """Return an array with its tokens in an order.

    Args:
        x: Whole sequences; for an order with rows, the dimension before `axis` is that of its rows.
        order: Result of `sequence_order`, or its inverse.
        axis: Axis of the tokens.
    """
    x = jnp.asarray(x)
    order = jnp.asarray(order)
    if order.ndim == 1:
        return jnp.take(x, order, axis=axis)
    shape = [1] * x.ndim
    shape[axis - order.ndim + 1 : axis + 1] = order.shape
    return jnp.take_along_axis(x, order.reshape(shape), axis=axis)


def padded_length(length: int, ranks: int, layout: SequenceLayout = "zigzag") -> int:
    """Return the shortest length, not below this one, that the layout divides."""
    pieces = ranks if layout == "contiguous" else 2 * ranks
    return -(-length // pieces) * pieces


def _by_document(segment_ids: Any, ranks: int, xp: Any) -> Any:
    """Return the order [S] of one row of segment ids [S]; see the module docstring."""
    pieces = 2 * ranks
    index = xp.arange(len(segment_ids), dtype=np.int32)
    in_documents = xp.argsort(segment_ids, stable=True).astype(np.int32)
    ids = segment_ids[in_documents]
    start = xp.searchsorted(ids, ids, side="left").astype(np.int32)
    length = xp.searchsorted(ids, ids, side="right").astype(np.int32) - start
    # Pieces first, first + 1, ... (modulo their number) are the longer ones.
    width = length // pieces
    longer = length % pieces
    first = start % pieces
    at_end = xp.minimum(longer, pieces - first)
    at_begin = longer - at_end
    place = index - start
    piece = xp.zeros_like(index)
    for c in range(1, pieces):
        begins = c * width + xp.minimum(c, at_begin) + xp.clip(c - first, 0, at_end)
        piece = piece + (place >= begins).astype(np.int32)
    slot = 2 * xp.minimum(piece, pieces - 1 - piece) + (piece >= ranks).astype(np.int32)
    return in_documents[xp.argsort(slot, stable=True)]
