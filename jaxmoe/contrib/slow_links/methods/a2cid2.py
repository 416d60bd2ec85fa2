# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""A2CiD2 in rounds: gossip on a graph, with a second copy that mixes in continuous time.

A worker holds parameters x and a copy y. Local steps move both. Between two exchanges a random time
dt passes, in which x and y mix; then pairs of neighbours exchange p = x_i - x_j:

    x, y = exp(dt [[-eta, eta], [eta, -eta]]) (x, y)
    x = x - p / 2;  y = y - alpha p
    eta = 1 / (2 sqrt(chi_1 chi_2)),  alpha = sqrt(chi_1 / chi_2) / 2

chi_1 is the inverse of the smallest positive eigenvalue of the mean Laplacian of an exchange, and
chi_2 half of the largest resistance of an edge. `none` leaves y out.

This is the pair of vectors of A2CiD2 (arXiv 2306.08289), with constants that were not compared with
its code. There workers run asynchronously; here all of them step and exchange together, and a
worker's clock is the exponential time dt, of mean 1, that it draws for each exchange and uses for
all its parameters. So x + y keeps its mean over the workers, and x keeps it where clocks agree.
DADAO (arXiv 2208.00779) is not this: its six vectors need the strong convexity and smoothness of
the loss, which those of models lack, and stand only in the tests. Pairs come from a table of random
matchings of the graph.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxmoe.contrib.slow_links.base import ReplicasBase
from jaxmoe.contrib.slow_links.codec import Payload, plain
from jaxmoe.contrib.slow_links.exchange import About, Decode, Exchange, no_state
from jaxmoe.contrib.slow_links.fragments import TrainingFacts
from jaxmoe.contrib.slow_links.gossip import Pairs, matched_pairs, receive
from jaxmoe.contrib.slow_links.method import Method
from jaxmoe.contrib.slow_links.timing import ExchangeTiming

Graph = Literal["ring", "complete"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class A2cid2Config(ReplicasBase):
    """Averages neighbours of a graph, helped by a second copy of the parameters."""

    name: ClassVar[str] = "a2cid2"

    every: int = 1
    """Steps between two exchanges."""
    graph: Graph = "ring"
    """Workers that may exchange."""
    gossip: Literal["continuous", "none"] = "continuous"
    """Whether a second copy of the parameters mixes with them between exchanges."""
    pairings: int = 64
    """Random matchings of the graph, one after another; each is a branch of the program."""
    seed: int = 0
    """Seed of the matchings."""

    def __post_init__(self):
        ReplicasBase.__post_init__(self)
        if self.pairings < 1:
            raise ValueError(f"replicas.pairings={self.pairings} must be at least 1")

    def build(self, facts: TrainingFacts) -> Method:
        """Return the method; see the base class.

        Raises:
            ValueError: The matchings do not join all workers.
        """
        edges = edges_of(self.graph, facts.workers)
        table = matched_pairs(facts.workers, edges, self.pairings, self.seed)
        rates = mixing_of(table, edges, facts.workers)
        is_continuous = self.gossip == "continuous"

        def mix(payload: Payload, decode: Decode, slow: Array, setting: About, state: Any) -> Any:
            decoded = decode(payload, slow)
            if not is_continuous:
                return 0.5 * (decoded + receive(decoded, table, setting, setting.round)), state
            # What the worker has learnt since the last exchange moves its copy as well.
            copy = slow + state + (decoded - slow)
            assert setting.round_key is not None  # set in every exchange of parameters
            clock = jax.random.fold_in(setting.round_key, jax.lax.axis_index(setting.axis))
            elapsed = jax.random.exponential(clock, dtype=decoded.dtype)
            moved = 0.5 * (1 - jnp.exp(-2 * rates.eta * elapsed)) * (copy - decoded)
            decoded = decoded + moved
            copy = copy - moved
            difference = decoded - receive(decoded, table, setting, setting.round)
            mixed = decoded - 0.5 * difference
            return mixed, (copy - rates.alpha * difference) - mixed

        exchange = Exchange(
            # The state is the copy minus the parameters, which is 0 before the first step.
            init=jnp.zeros_like if is_continuous else no_state,
            mix=mix,
            is_shared=False,
            copies=lambda workers: float(np.mean([_senders(pairs) for pairs in table])) / workers,
        )
        return Method(
            timing=ExchangeTiming(every=self.every),
            codec=lambda leaf: plain(),
            exchange=lambda leaf: exchange,
            outer=None,
            is_shared=False,
            anchor="merged",
        )


class GossipMixing(NamedTuple):
    """Constants of a graph and its matchings."""

    eta: float
    """Rate at which parameters and their copies mix."""
    alpha: float
    """Step of the copy in an exchange."""


def edges_of(graph: Graph, workers: int) -> tuple[tuple[int, int], ...]:
    """Return the edges of a graph of workers."""
    pairs = [(worker, partner) for partner in range(workers) for worker in range(partner)]
    if graph == "complete":
        return tuple(pairs)
    return tuple(pair for pair in pairs if pair[1] - pair[0] in (1, workers - 1))


def mixing_of(
    table: Sequence[Pairs], edges: Sequence[tuple[int, int]], workers: int
) -> GossipMixing:
    """Return the constants of a table of matchings, in which an exchange takes the time 1.

    Args:
        table: Matchings.
        edges: Edges of the graph.
        workers: Number of workers.

    Raises:
        ValueError: The matchings do not join all workers.
    """
    laplacian = np.zeros((workers, workers))
    for pairs in table:
        for worker, partner in pairs:
            if worker < partner:
                edge = np.eye(workers)[worker] - np.eye(workers)[partner]
                laplacian += np.outer(edge, edge) / len(table)
    values = np.linalg.eigvalsh(laplacian)
    if values[1] < 1e-9:
        raise ValueError(
            f"replicas.pairings={len(table)} matchings do not join {workers} workers: raise it"
        )
    inverse = np.linalg.pinv(laplacian)
    resistances = [
        inverse[worker, worker] + inverse[partner, partner] - 2 * inverse[worker, partner]
        for worker, partner in edges
    ]
    first = 1 / float(values[1])
    second = float(max(resistances)) / 2
    return GossipMixing(1 / (2 * math.sqrt(first * second)), 0.5 * math.sqrt(first / second))


def _senders(pairs: Pairs) -> int:
    """Return the number of workers that send to another in a round."""
    return sum(worker != partner for worker, partner in pairs)
