# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""SparseLoCo: the largest 1.6% of all changes, in 2 bits, with error feedback (arXiv 2508.15706).

    e = decay * e + (slow - own);  sent = C(e);  e = e - sent
    slow = slow - lr * mean(sent);  own = slow

C is `codecs/top_k.py`. There is no outer momentum: the error feedback takes its place.
The paper divides by the number of workers, its public code by the number of those that sent a
number at that place; `reduce` chooses, and the paper's reading is the default. The public code
applies an outer learning rate other than 1 twice, inside the error feedback and in the step; here
it is applied in the step alone.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

import optax

from jaxmoe.contrib.slow_links.base import AveragingBase
from jaxmoe.contrib.slow_links.codec import Codec, error_feedback, plain
from jaxmoe.contrib.slow_links.codecs.top_k import SIDE, top_k
from jaxmoe.contrib.slow_links.exchange import Exchange, gathered_mean, mean
from jaxmoe.contrib.slow_links.fragments import Leaf, TrainingFacts, is_small
from jaxmoe.contrib.slow_links.method import Method
from jaxmoe.contrib.slow_links.timing import ExchangeTiming
from jaxmoe.contrib.slow_links.weighting import weighting_of


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SparseConfig(AveragingBase):
    """Averages the largest changes of each 64 x 64 tile, in two bits, with error feedback."""

    name: ClassVar[str] = "sparse"

    every: int = 30
    """Steps between two exchanges."""
    kept: int = 64
    """Numbers kept of a tile of 4096; the same share of smaller tiles, at least one."""
    values: Literal["two_bits", "float32"] = "two_bits"
    """Encoding of the numbers kept; routers and norms travel whole as float32."""
    decay: float = 0.95
    """Factor on what was not sent, from one exchange to the next."""
    reduce: Literal["workers", "senders"] = "workers"
    """Divisor of each sum: all workers, or those that sent a number at that place."""
    learning_rate: float = 1.0
    """Learning rate of the outer optimiser."""

    def __post_init__(self):
        # Named in full: a slotted dataclass has no usable zero-argument super().
        AveragingBase.__post_init__(self)
        if not 1 <= self.kept <= SIDE * SIDE:
            raise ValueError(
                f"replicas.kept={self.kept} must be from 1 to {SIDE * SIDE}, the numbers of a tile"
            )
        if not 0.0 <= self.decay <= 1.0:
            raise ValueError(f"replicas.decay={self.decay} must lie in [0, 1]")

    def build(self, facts: TrainingFacts) -> Method:
        """Return the method; see the base class."""
        del facts

        def codec(leaf: Leaf) -> Codec:
            if is_small(leaf):
                return plain()
            return error_feedback(top_k(leaf, self.kept / SIDE**2, self.values), self.decay)

        def exchange(leaf: Leaf) -> Exchange:
            return mean() if is_small(leaf) else gathered_mean(self.reduce)

        return Method(
            timing=ExchangeTiming(every=self.every),
            codec=codec,
            exchange=exchange,
            outer=optax.sgd(self.learning_rate),
            weighting=weighting_of(self.weights),
        )
