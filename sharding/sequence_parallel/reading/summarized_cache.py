# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Defines a cache whose slots are in pages, and reads pages of it.

Pages are cut over devices as slots are: P pages of a row are on all devices, p on this one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import QuantizedArray


class SummarizedCache(NamedTuple):
    """Cached keys and values of a stack of layers, with what is known of their pages."""

    k: Float[Array, "L B U M H"] | QuantizedArray
    v: Float[Array, "L B U M H"] | QuantizedArray
    summaries: dict[str, Float[Array, "L B P M H"]]
    """Smallest and largest of each feature of a page's keys, or their sum."""
    is_kept: Bool[Array, "L B P M"]
    """False for evicted pages."""
    is_chosen: Bool[Array, "l B P M"]
    """Pages that the latest token read, by the layers that choose."""


def all_pages(of_pages: Float[Array, "B p M"], axes: tuple[str, ...]) -> Float[Array, "B M P"]:
    """Return the numbers of the pages of all devices that share a row.

    Args:
        of_pages: Those of this device.
        axes: Mesh axes over which pages are cut.
    """
    if axes:
        of_pages = jax.lax.all_gather(of_pages, axes, axis=1, tiled=True)
    return of_pages.swapaxes(1, 2)


def own_pages(
    of_pages: Bool[Array, "B M P"], pages: Int[Array, "1 p"], axes: tuple[str, ...]
) -> Bool[Array, "B p M"]:
    """Return the part of `all_pages` that this device holds.

    Args:
        of_pages: Values of the pages of all devices.
        pages: Numbers of the pages of this device.
        axes: Mesh axes over which pages are cut.
    """
    of_pages = of_pages.swapaxes(1, 2)
    if not axes:
        return of_pages
    return jax.lax.dynamic_slice_in_dim(of_pages, pages[0, 0], pages.shape[1], axis=1)


def pages_of(
    stacked: Any, layer: Int[Array, ""], pages: Int[Array, "B M K"], size: int
) -> Float[Array, "R U 1 H"] | QuantizedArray:
    """Return some pages of one layer, each head of keys as a row of its own (R = B M, U = K size).

    Args:
        stacked: Keys or values of all layers [L B U M H].
        layer: Layer that is read.
        pages: Pages of each row and head.
        size: Tokens of a page.
    """
    batch, heads, _ = pages.shape
    rows = jnp.arange(batch, dtype=jnp.int32)[:, None, None]
    head = jnp.arange(heads, dtype=jnp.int32)[None, :, None]

    def read(part: Array) -> Array:
        paged = part.reshape(*part.shape[:2], -1, size, *part.shape[3:])
        tokens = paged[layer, rows, pages, :, head]  # B, M, K, size, H
        return tokens.reshape(batch * heads, -1, 1, part.shape[-1])

    return jax.tree.map(read, stacked)
