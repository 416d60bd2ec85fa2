# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Tables of who sends to whom, and exchanges between some workers only.

A permute needs its pairs when the program is compiled. So a seed gives a table of rounds, each a
static list of pairs, and the number of the exchange chooses a round by `lax.switch`: alike on all
workers, as collectives in a branch must be.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PyTree

from jaxmoe.contrib.slow_links.exchange import About
from sharding.stored_programs import store_no_programs_on_cpus

Pairs = tuple[tuple[int, int], ...]
"""(sender, receiver) of the messages of a round; a worker sends and receives at most once."""


def random_pairs(workers: int, rounds: int, seed: int) -> tuple[Pairs, ...]:
    """Return rounds in which random pairs of workers exchange; the odd one keeps its own.

    Args:
        workers: Number of workers.
        rounds: Number of rounds.
        seed: Seed of the table.
    """
    rng = np.random.default_rng(seed)

    def draw_round() -> Pairs:
        order = [int(worker) for worker in rng.permutation(workers)]
        peer = {worker: worker for worker in order}
        for member, partner in zip(order[::2], order[1::2], strict=False):
            peer |= {member: partner, partner: member}
        return tuple(sorted(peer.items()))

    return tuple(draw_round() for _ in range(rounds))


def matched_pairs(
    workers: int, edges: Sequence[tuple[int, int]], rounds: int, seed: int
) -> tuple[Pairs, ...]:
    """Return rounds in which workers exchange along edges of a graph; others keep their own.

    Args:
        workers: Number of workers.
        edges: Pairs of workers that are joined.
        rounds: Number of rounds; each takes edges in random order that share no worker.
        seed: Seed of the table.
    """
    rng = np.random.default_rng(seed)

    def draw_round() -> Pairs:
        peer = {worker: worker for worker in range(workers)}
        for index in rng.permutation(len(edges)):
            member, partner = edges[int(index)]
            if peer[member] == member and peer[partner] == partner:
                peer |= {member: partner, partner: member}
        return tuple(sorted(peer.items()))

    return tuple(draw_round() for _ in range(rounds))


def random_peers(workers: int, rounds: int, share: float, seed: int) -> tuple[Pairs, ...]:
    """Return rounds in which each worker receives from a random other one with a probability.

    Args:
        workers: Number of workers.
        rounds: Number of rounds.
        share: Probability that a worker receives.
        seed: Seed of the table.
    """
    rng = np.random.default_rng(seed)

    def draw_round() -> Pairs:
        order = [int(worker) for worker in rng.permutation(workers)]
        cycle = zip(order, [*order[1:], order[0]], strict=True)
        chosen = rng.random(workers) < share
        return tuple(sorted(pair for pair, take in zip(cycle, chosen, strict=True) if take))

    return tuple(draw_round() for _ in range(rounds))


def receive(
    tree: PyTree[Array], table: Sequence[Pairs], setting: About, round: Int[Array, ""]
) -> PyTree[Array]:
    """Return what a worker receives in a round; anything if it receives nothing.

    Args:
        tree: What this worker sends.
        table: Rounds.
        setting: Axis of the workers.
        round: Number of the round, which wraps around the table.
    """
    if setting.is_spread:
        store_no_programs_on_cpus()  # each leaf has its own conditional around its permutes
    different = sorted(set(table))
    everyone = set(range(setting.workers))

    def branch(pairs: Pairs, tree: PyTree[Array]) -> PyTree[Array]:
        silent = sorted(everyone - {sender for sender, _ in pairs})
        without = sorted(everyone - {receiver for _, receiver in pairs})
        pairs_without = () if setting.is_spread else tuple(zip(silent, without, strict=True))
        pairs = (*pairs, *pairs_without)
        return jax.tree.map(lambda x: jax.lax.ppermute(x, setting.axis, pairs), tree)

    branches = [lambda tree, pairs=pairs: branch(pairs, tree) for pairs in different]
    numbers = jnp.asarray([different.index(pairs) for pairs in table], jnp.int32)
    return jax.lax.switch(numbers[round % len(table)], branches, tree)
