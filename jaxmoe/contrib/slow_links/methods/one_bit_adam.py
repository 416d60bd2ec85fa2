# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""1-bit Adam: one bit a number each way, with error feedback (arXiv 2102.02888).

The first updates average gradients, for ordinary Adam. Then the second moments v stay, and

    z_i = b1 m + (1 - b1) g_i + e_i;     sent_i = scale_i sign(z_i);   e_i = z_i - sent_i
    z   = mean of sent_i + e;            m = scale sign(z);            e = z - m
    w   = w - rate * (m / (1 - b1^t) / (sqrt(v_hat) + epsilon) + decay w)

The share of the first updates is 20 % of the steps; the paper advises 15 to 25 %. Clipping then
bounds the norm of m, which the optimiser keeps clipped. Numbers with v = 0, such as those of an
expert that had no token, are neither sent nor changed, as their sign would be sent at full size.
Norms and routers travel whole.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, cast

from jaxmoe import combinations
from jaxmoe.contrib.slow_links.codec import Codec, error_feedback, plain
from jaxmoe.contrib.slow_links.codecs.sign import sign, two_sided_mean
from jaxmoe.contrib.slow_links.exchange import About, Exchange
from jaxmoe.contrib.slow_links.fragments import Leaf, TrainingFacts, flat, is_small
from jaxmoe.contrib.slow_links.gradient_base import GradientBase, stacked_dimensions
from jaxmoe.contrib.slow_links.gradient_method import (
    Agreed,
    GradientMethod,
    mean_of_alive,
    separately,
)
from jaxmoe.contrib.slow_links.received_momentum import ReceivingAdamW, received_moments
from jaxmoe.optim import AdamWConfig
from jaxmoe.optim.groups import Optimizer


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OneBitAdamConfig(GradientBase):
    """Sends one bit a number of Adam's momentum, after steps with whole gradients."""

    name: ClassVar[str] = "one_bit_adam"

    freeze_share: float = 0.2
    """Share of the steps that average whole gradients, before the second moments stay."""
    momentum: float = 0.9
    """Share of the agreed momentum in a message; must be optimizer.beta1."""

    def __post_init__(self):
        GradientBase.__post_init__(self)
        if not 0.0 < self.freeze_share <= 1.0:
            raise ValueError(f"replicas.freeze_share={self.freeze_share} must lie in (0, 1]")
        if not 0.0 <= self.momentum < 1.0:
            raise ValueError(f"replicas.momentum={self.momentum} must lie in [0, 1)")

    def updates_before(self, steps: int) -> int:
        """Return the number of updates from whole gradients in a run of some steps."""
        return max(1, round(self.freeze_share * steps))

    def adapt(self, optimizer: Optimizer, steps: int) -> Optimizer:
        """Return the optimiser; see the base class."""
        combinations.check(replicas=self, optimizer=optimizer)
        return ReceivingAdamW.of(cast(AdamWConfig, optimizer), self.updates_before(steps))

    def build(self, facts: TrainingFacts) -> GradientMethod:
        """Return the method; see the base class."""
        leaves = {leaf.path: leaf for leaf in facts.leaves}
        after = self.updates_before(facts.steps)

        def codec(leaf: Leaf, setting: About | None) -> Codec:
            if is_small(leaf):
                return plain()
            return error_feedback(sign(stacked_dimensions(leaf), setting))

        def exchange(leaf: Leaf, setting: About | None) -> Exchange:
            del setting
            if is_small(leaf):
                return mean_of_alive()
            return two_sided_mean(stacked_dimensions(leaf))

        def agree(opt_state: Any) -> Agreed:
            moments = received_moments(opt_state)
            mu = flat(moments.mu)
            nu = flat(moments.nu)
            return Agreed(
                momentum={path: mu[path] for path in leaves},
                mask={path: nu[path] > 0.0 for path in leaves},
                is_encoded=moments.count >= after,
            )

        return GradientMethod(
            codec=codec,
            exchange=separately(leaves, exchange),
            carry=self.momentum,
            agreed=agree,
        )
