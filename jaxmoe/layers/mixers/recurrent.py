# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Documents of a row, and the part of a cache of one layer, for mixers that carry a state."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxmoe.layers.records import LayerCache, TokenInputs
from sharding import axes as ax
from sharding.constrain import Placement


def document_ids(tokens: TokenInputs, cache: LayerCache | None) -> Int[Array, "B S"]:
    """Return the document of each token, 0 for padding.

    Args:
        tokens: Segments, or the mask of rows that are one document.
        cache: State that the first document continues, if it is given.

    Raises:
        ValueError: A cache is given for rows of several documents.
    """
    if tokens.segment_ids is None:
        return tokens.token_mask.astype(jnp.int32)
    if cache is not None:
        raise ValueError("a cache cannot hold packed segments")
    return tokens.segment_ids


def parts_of(tokens: TokenInputs, placement: Placement) -> tuple[str, ...]:
    """Return the mesh axes over which rows are cut; empty where a device holds whole rows.

    Args:
        tokens: Inputs of all layers.
        placement: Layout of activations.

    Raises:
        ValueError: The tokens of a row are laid out in another order.
    """
    shape = dict(jax.sharding.get_abstract_mesh().shape)
    axes = placement.mesh_axes(ax.ACT_SEQ_INNER)
    axes = tuple(axis for axis in axes if shape.get(axis, 1) > 1)
    if axes and (tokens.level is not None or tokens.places is not None):
        raise ValueError(
            "recurrent layers on rows cut over mesh.seq need the tokens in their order, and"
            " data.packing levels or a layout by document has another: set data.packing to best_fit"
            " and execution.sequence_parallel.layout to contiguous"
        )
    return axes


def held_of_layer(cache: LayerCache | None) -> dict[str, Array]:
    """Return the arrays of a layer in a cache that is a named tuple; none without a cache."""
    if cache is None:
        return {}
    return {name: part[cache.layer] for name, part in cache.entries._asdict().items()}


def with_layer(cache: LayerCache | None, new: dict[str, Array]) -> Any:
    """Return `cache.entries` with the new arrays of the layer; None without a cache.

    Args:
        cache: Cache of a stack of layers.
        new: Arrays of the layer by their names in the cache.
    """
    if cache is None:
        return None
    parts = {
        name: part.at[cache.layer].set(new[name].astype(part.dtype))
        for name, part in cache.entries._asdict().items()
    }
    return type(cache.entries)(**parts)
