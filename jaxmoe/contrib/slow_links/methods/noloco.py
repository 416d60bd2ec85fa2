# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""NoLoCo: pairs of workers average, and no parameter is reduced over all (arXiv 2506.10911).

Worker i and its peer of this round form a group G. Each has its own slow parameters and momentum:

    m = beta m + a mean_G(own - slow) + a (mean_G(slow) - slow_i)
    slow_i = slow_i + m;  own_i = slow_i

With gradients of 0 the mean of the slow parameters stays and their distance shrinks. The factor of
the second term has a name of its own in the paper; its value there is not certain, and the public
code uses a. Pairs come from a table of seeded permutations.

Parameters travel between pairs alone. An exchange still adds up two integers over all workers, the
numbers of refused steps, so that all processes stop a run alike.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import optax
from jaxtyping import Array

from jaxmoe.contrib.slow_links.base import ReplicasBase
from jaxmoe.contrib.slow_links.codec import Payload, plain
from jaxmoe.contrib.slow_links.exchange import About, Decode, Exchange, no_state
from jaxmoe.contrib.slow_links.fragments import TrainingFacts
from jaxmoe.contrib.slow_links.gossip import random_pairs, receive
from jaxmoe.contrib.slow_links.method import Method
from jaxmoe.contrib.slow_links.timing import ExchangeTiming


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NoLoCoConfig(ReplicasBase):
    """Averages random pairs of workers, each with its own slow parameters, without all-reduce."""

    name: ClassVar[str] = "noloco"

    every: int = 50
    """Steps between two exchanges."""
    pairings: int = 64
    """Random pairings of the workers, one after another; each is a branch of the program."""
    seed: int = 0
    """Seed of the pairings."""
    learning_rate: float = 0.7
    """Learning rate of the outer optimiser."""
    momentum: float = 0.5
    """Momentum of the outer optimiser."""

    def __post_init__(self):
        ReplicasBase.__post_init__(self)
        if self.pairings < 1:
            raise ValueError(f"replicas.pairings={self.pairings} must be at least 1")

    def build(self, facts: TrainingFacts) -> Method:
        """Return the method; see the base class."""
        table = random_pairs(facts.workers, self.pairings, self.seed)

        def mix(payload: Payload, decode: Decode, slow: Array, setting: About, state: Any) -> Any:
            decoded = decode(payload, slow)
            theirs, their_slow = receive((decoded, slow), table, setting, setting.round)
            return 0.5 * (decoded + theirs) + (slow - 0.5 * (slow + their_slow)), state

        exchange = Exchange(init=no_state, mix=mix, is_shared=False, copies=lambda workers: 2.0)
        return Method(
            timing=ExchangeTiming(every=self.every),
            codec=lambda leaf: plain(),
            exchange=lambda leaf: exchange,
            outer=optax.sgd(self.learning_rate, self.momentum),
            is_shared=False,
        )
