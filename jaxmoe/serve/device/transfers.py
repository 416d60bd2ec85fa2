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
from sharding.sequence_parallel import PAGE_AXES

_AT_ONCE = 16
"""Pages of one call."""

Held = dict[str, np.ndarray]
"""Pages in host memory by path of the stack, [L pages G M 2 H]."""


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
    island = execution.placement.island

    @jax.jit
    def take(pools: Pools, pages: Any) -> Any:
        def run(kv, pages, *, batch_axes):
            del batch_axes
            return kv.at[:, pages].get(mode="clip")

        read = island(run, in_axes=(PAGE_AXES, (None,)), out_axes=PAGE_AXES)
        return {path: read(kv, pages) for path, kv in pools.items()}

    @functools.partial(jax.jit, donate_argnums=0)
    def put(pools: Pools, pages: Any, held: Any) -> Pools:
        def run(kv, pages, held, *, batch_axes):
            del batch_axes
            return kv.at[:, pages].set(held, mode="drop")

        write = island(run, in_axes=(PAGE_AXES, (None,), PAGE_AXES), out_axes=PAGE_AXES)
        return {path: write(kv, pages, held[path]) for path, kv in pools.items()}

    def copy(pools: Pools, pairs: Sequence[tuple[int, int]]) -> Pools:
        for some in _in_parts(pairs):
            source, target = (np.asarray(pages, np.int32) for pages in zip(*some, strict=True))
            pools = put(pools, _padded(target, pools), take(pools, _padded(source, pools)))
        return pools

    def to_host(pools: Pools, pages: Sequence[int]) -> Held:
        parts = [
            {path: np.asarray(kv)[:, : len(some)] for path, kv in found.items()}
            for some in _in_parts(pages)
            for found in [take(pools, _padded(np.asarray(some, np.int32), pools))]
        ]
        return {path: np.concatenate([one[path] for one in parts], 1) for path in pools}

    def from_host(pools: Pools, pages: Sequence[int], held: Held) -> Pools:
        first = 0
        for some in _in_parts(pages):
            own = {path: kv[:, first : first + len(some)] for path, kv in held.items()}
            rest = _AT_ONCE - len(some)
            given = {
                path: np.pad(kv, ((0, 0), (0, rest), *((0, 0),) * (kv.ndim - 2)))
                for path, kv in own.items()
            }
            pools = put(pools, _padded(np.asarray(some, np.int32), pools), given)
            first += len(some)
        return pools

    return Transfers(copy, to_host, from_host)


def _in_parts(pages: Sequence[Any]) -> list[Sequence[Any]]:
    return [pages[first : first + _AT_ONCE] for first in range(0, len(pages), _AT_ONCE)]


def _padded(pages: np.ndarray, pools: Pools) -> Any:
    """Return page numbers up to the size of a call; those beyond the pool are not written."""
    outside = next(iter(pools.values())).shape[1]
    return jnp.asarray(np.pad(pages, (0, _AT_ONCE - len(pages)), constant_values=outside))
