# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Moves pages: from one to another on the device, and to host memory and back.

Each program takes a fixed number of pages, so that there is one of each kind.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.execution import ServedConfig
from jaxmoe.serve.device.step import Pools
from sharding.sequence_parallel import page_axes

_AT_ONCE = 16
"""Pages of one call."""

Held = dict[str, Any]
"""Pages in host memory [L pages G ...], by path of the stack."""


class HeldPages(NamedTuple):
    """Pages with what the executor keeps beside them."""

    pools: Held
    """Keys and values."""
    experts: np.ndarray
    """Experts of their tokens [pages G L K]."""


class Transfers(NamedTuple):
    """Functions of pools and lists of pages; the pools are donated where they are changed."""

    copy: Callable[[Pools, Sequence[tuple[int, int]]], Pools]
    """Return the pools with the content of some pages (from, to) copied."""
    to_host: Callable[[Pools, Sequence[int]], Held]
    """Return the content of some pages."""
    from_host: Callable[[Pools, Sequence[int], Held], Pools]
    """Return the pools with this content in some pages."""


def make_transfers(execution: ServedConfig) -> Transfers:
    """Return the functions for pools that are cut as the mesh is.

    Args:
        execution: Placement of the pools.
    """
    region = execution.placement.region

    @jax.jit
    def take(pools: Pools, pages: Any) -> Any:
        def run(pools, pages, *, batch_axes):
            del batch_axes
            return jax.tree.map(lambda part: part.at[:, pages].get(mode="clip"), pools)

        axes = page_axes(pools)
        return region(run, in_axes=(axes, (None,)), out_axes=axes)(pools, pages)

    @functools.partial(jax.jit, donate_argnums=0)
    def put(pools: Pools, pages: Any, host_pages: Any) -> Pools:
        def run(pools, pages, host_pages, *, batch_axes):
            del batch_axes
            return jax.tree.map(
                lambda part, new: part.at[:, pages].set(new, mode="drop"), pools, host_pages
            )

        axes = page_axes(pools)
        return region(run, in_axes=(axes, (None,), axes), out_axes=axes)(pools, pages, host_pages)

    def copy(pools: Pools, pairs: Sequence[tuple[int, int]]) -> Pools:
        for page_part in _in_parts(pairs):
            source, target = (np.asarray(pages, np.int32) for pages in zip(*page_part, strict=True))
            pools = put(pools, _pad(target, pools), take(pools, _pad(source, pools)))
        return pools

    def to_host(pools: Pools, pages: Sequence[int]) -> Held:
        parts = [
            _cut(take(pools, _pad(np.asarray(page_part, np.int32), pools)), 0, len(page_part))
            for page_part in _in_parts(pages)
        ]
        return jax.tree.map(lambda *arrays: np.concatenate(arrays, axis=1), *parts)

    def from_host(pools: Pools, pages: Sequence[int], host_pages: Held) -> Pools:
        first = 0
        for page_part in _in_parts(pages):
            filled_part = jax.tree.map(_fill, _cut(host_pages, first, len(page_part)))
            pools = put(pools, _pad(np.asarray(page_part, np.int32), pools), filled_part)
            first += len(page_part)
        return pools

    return Transfers(copy, to_host, from_host)


def part_pages(host_pages: HeldPages) -> list[HeldPages]:
    """Return pages one by one, each with memory of its own."""
    count = len(host_pages.experts)
    return [
        HeldPages(
            jax.tree.map(lambda part, n=n: part[:, n : n + 1].copy(), host_pages.pools),
            host_pages.experts[n : n + 1].copy(),
        )
        for n in range(count)
    ]


def join_pages(pages: Sequence[HeldPages]) -> HeldPages:
    """Return some pages as one block."""
    pools = jax.tree.map(
        lambda *parts: np.concatenate(parts, 1), *(page_group.pools for page_group in pages)
    )
    return HeldPages(pools, np.concatenate([page_group.experts for page_group in pages]))


def num_transfers(num_pages: int) -> int:
    """Return the calls that move a number of pages."""
    return -(-num_pages // _AT_ONCE)


def host_bytes(host_pages: Held) -> int:
    """Return the bytes of pages in host memory."""
    return sum(part.nbytes for part in jax.tree.leaves(host_pages))


def _in_parts(pages: Sequence[Any]) -> list[Sequence[Any]]:
    return [pages[first : first + _AT_ONCE] for first in range(0, len(pages), _AT_ONCE)]


def _cut(tree: Any, first: int, count: int) -> Held:
    """Return some of the pages, in host memory."""
    return jax.tree.map(lambda part: np.asarray(part)[:, first : first + count], tree)


def _fill(part: np.ndarray) -> np.ndarray:
    """Return pages up to the size of a call."""
    return np.pad(part, ((0, 0), (0, _AT_ONCE - part.shape[1]), *((0, 0),) * (part.ndim - 2)))


def _pad(pages: np.ndarray, pools: Pools) -> Any:
    """Return page numbers up to the size of a call; those beyond the pool are not written."""
    outside = jax.tree.leaves(pools)[0].shape[1]
    return jnp.asarray(np.pad(pages, (0, _AT_ONCE - len(pages)), constant_values=outside))
