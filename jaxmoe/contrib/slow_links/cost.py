# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Bytes that a worker sends, from the method alone.

For parameters that are not cut within a worker; where a worker is itself a mesh, its devices share
the bytes out as they do the parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jaxmoe.contrib.slow_links.fragments import Leaf
from jaxmoe.contrib.slow_links.method import Method


class Cost(NamedTuple):
    """Bytes that one worker sends."""

    exchanges: tuple[float, ...]
    """Bytes of one exchange of each fragment."""
    step: float
    """Mean over the steps."""
    peak: float
    """Largest exchange of one fragment."""


def cost(method: Method, leaves: Sequence[Leaf], workers: int, worker: int | None = None) -> Cost:
    """Return what a worker sends.

    Args:
        method: Method.
        leaves: Trained parameters.
        workers: Number of workers.
        worker: Number of the worker, where some encode otherwise; None for the mean of all.
    """
    leaf_of = {leaf.path: leaf for leaf in leaves}
    weights = 0 if method.weighting is None else 4 * (workers - 1)
    exchanges = tuple(
        weights
        + sum(
            _bits(method, leaf_of[path], fragment.shape(leaf_of[path]), workers, worker)
            / 8
            * method.exchange(leaf_of[path]).copies(workers)
            for path in (*fragment.strided, *fragment.whole_paths)
        )
        for fragment in method.fragments(leaves)
    )
    step = sum(
        sent * method.timing.exchanges_a_step(fragment) for fragment, sent in enumerate(exchanges)
    )
    return Cost(exchanges, step, max(exchanges))


def _bits(
    method: Method, leaf: Leaf, shape: tuple[int, ...], workers: int, worker: int | None
) -> float:
    """Return the bits of a payload of a worker, or the mean of all workers."""
    bits = method.codec(leaf).bits(shape)
    if method.slow is None or (narrow := method.slow.codec(leaf)) is None:
        return bits
    slow = method.slow.workers
    share = len(slow) / workers if worker is None else float(worker in slow)
    return (1.0 - share) * bits + share * narrow.bits(shape)
