# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""DiLoCo: workers train alone and average every few hundred steps (arXiv 2311.08105).

delta = mean(slow - own);  slow = slow - lr * (delta + m),  m Nesterov momentum;  own = slow

The optimiser of each worker is never exchanged nor reset.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import optax

from jaxmoe.contrib.slow_links.base import AveragingBase
from jaxmoe.contrib.slow_links.codec import plain
from jaxmoe.contrib.slow_links.exchange import mean
from jaxmoe.contrib.slow_links.fragments import TrainingFacts
from jaxmoe.contrib.slow_links.method import Method
from jaxmoe.contrib.slow_links.timing import ExchangeTiming
from jaxmoe.contrib.slow_links.weighting import weighting_of


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DiLoCoConfig(AveragingBase):
    """Averages all parameters every few hundred steps, with Nesterov momentum."""

    name: ClassVar[str] = "diloco"

    every: int = 500
    """Steps between two exchanges; the last step of a run has one as well."""
    learning_rate: float = 0.7
    """Learning rate of the outer optimiser."""
    momentum: float = 0.9
    """Nesterov momentum of the outer optimiser."""

    def build(self, facts: TrainingFacts) -> Method:
        """Return the method; see the base class."""
        del facts
        return Method(
            timing=ExchangeTiming(every=self.every),
            codec=lambda leaf: plain(),
            exchange=lambda leaf: mean(),
            outer=optax.sgd(self.learning_rate, self.momentum, nesterov=True),
            weighting=weighting_of(self.weights),
        )
