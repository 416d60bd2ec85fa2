# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Gossip between a few workers, and one average of all at the end (arXiv 2507.06542).

In most exchanges a worker averages its parameters with those of a random other one, or, with the
probability 1 - peers, keeps its own. From a share of the steps on, and in the last exchange in any
case, the average is over all workers. Optimiser states never move.

Receivers average, senders do not: rows of the mixing matrix sum to 1 and columns need not, so the
mean of all workers drifts during the gossip. In the public code peers are drawn independently; here
senders of a round are different, so that a worker sends at most once.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxmoe.contrib.slow_links.base import ReplicasBase
from jaxmoe.contrib.slow_links.codec import Payload, plain
from jaxmoe.contrib.slow_links.exchange import About, Decode, Exchange, no_state
from jaxmoe.contrib.slow_links.fragments import TrainingFacts
from jaxmoe.contrib.slow_links.gossip import random_peers, receive
from jaxmoe.contrib.slow_links.method import Method
from jaxmoe.contrib.slow_links.timing import ExchangeTiming


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SingleMergeConfig(ReplicasBase):
    """Averages with a few random peers, and with all workers at the end."""

    name: ClassVar[str] = "single_merge"

    every: int = 100
    """Steps between two exchanges."""
    peers: float = 0.2
    """Probability that a worker averages with a random peer in an exchange; 0 never."""
    complete_from: float = 0.99
    """Share of the steps from which on exchanges average all workers."""
    rounds: int = 64
    """Random choices of peers, one after another; each is a branch of the program."""
    seed: int = 0
    """Seed of the choices."""

    def __post_init__(self):
        ReplicasBase.__post_init__(self)
        for field in ("peers", "complete_from"):
            if not 0.0 <= getattr(self, field) <= 1.0:
                raise ValueError(f"replicas.{field}={getattr(self, field)} must lie in [0, 1]")
        if self.rounds < 1:
            raise ValueError(f"replicas.rounds={self.rounds} must be at least 1")

    def build(self, facts: TrainingFacts) -> Method:
        """Return the method; see the base class."""
        table = random_peers(facts.workers, self.rounds, self.peers, self.seed)
        receivers = np.zeros((self.rounds, facts.workers), bool)
        for row, pairs in zip(receivers, table, strict=True):
            row[[receiver for _, receiver in pairs]] = True
        exchanges = math.ceil(facts.steps / self.every)  # the last after the last step
        first = min(math.ceil(self.complete_from * facts.steps / self.every), exchanges)

        def gossip(x: Array, setting: About) -> Array:
            theirs = receive(x, table, setting, setting.round)
            receives = jnp.asarray(receivers)[setting.round % self.rounds]
            is_mixed = receives[jax.lax.axis_index(setting.axis)]
            return jnp.where(is_mixed, 0.5 * (x + theirs), x)

        def everyone(x: Array, setting: About) -> Array:
            return jax.lax.psum(x, setting.axis) / setting.workers

        def mix(payload: Payload, decode: Decode, slow: Array, setting: About, state: Any) -> Any:
            decoded = decode(payload, slow)
            # Exchange number n is after step (n + 1) every, or the last step.
            mixed = jax.lax.cond(
                setting.round + 1 >= first,
                lambda x: everyone(x, setting),
                lambda x: gossip(x, setting),
                decoded,
            )
            return mixed, state

        sent = sum(len(pairs) for pairs in table) / len(table) / facts.workers
        share = (exchanges - max(first, 1) + 1) / exchanges
        exchange = Exchange(
            init=no_state,
            mix=mix,
            is_shared=False,
            copies=lambda workers: (1 - share) * sent + share * 2 * (workers - 1) / workers,
        )
        return Method(
            timing=ExchangeTiming(every=self.every),
            codec=lambda leaf: plain(),
            exchange=lambda leaf: exchange,
            outer=None,
            is_shared=False,
            anchor="merged",
        )
