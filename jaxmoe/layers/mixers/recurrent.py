# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Documents of a row, and the part of a cache of one layer, for mixers that carry a state."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxmoe.layers.records import LayerCache, TokenInputs


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
