# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""CO2: averages a whole round late (arXiv 2401.16265).

The mean x of the parameters after round r travels during round r + 1 and is merged after it:

    m = clip(mu m + (slow - x) / penalty, +-c);  slow = slow - a m;  own = slow

so the first merge is after two rounds, and no product of a round needs its message. The steps that
send are a program of their own, in which no conditional holds the exchange
(`workers/programs.py`), and on a TPU large parameters travel by permutes. Compiled
for v5e:2x4 (2 workers of 4 devices, 4 layers of width 512, libtpu 0.0.42, jax 0.10) 6 of the 16
permutes, with 48% of the bytes, have products of the step between start and done; others lie beside
its other arithmetic. An all-reduce stayed synchronous there, whatever compiler options were tried:
xla_enable_async_all_reduce, xla_tpu_enable_async_collective_fusion_fuse_all_reduce,
xla_tpu_enable_data_parallel_all_reduce_opt.

Chosen here: the momentum that is kept is the clipped one (the public code discards the result of
its clip), and the penalty is a constant, as in the public code; the paper's depends on the measured
delay, by a formula that is not given here.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax

from jaxmoe.contrib.slow_links.base import AveragingBase
from jaxmoe.contrib.slow_links.codec import plain
from jaxmoe.contrib.slow_links.exchange import mean, permuted_mean
from jaxmoe.contrib.slow_links.fragments import TrainingFacts, is_small
from jaxmoe.contrib.slow_links.method import Method
from jaxmoe.contrib.slow_links.timing import ExchangeTiming
from jaxmoe.contrib.slow_links.weighting import weighting_of


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CO2Config(AveragingBase):
    """Averages all parameters a whole round late, beside the step that sends them."""

    name: ClassVar[str] = "co2"

    every: int = 48
    """Steps between two exchanges."""
    delay: int | None = None
    """Steps until an average is merged; None for a whole round."""
    learning_rate: float = 1.0
    """Learning rate of the outer optimiser."""
    momentum: float = 0.5
    """Momentum of the outer optimiser."""
    penalty: float = 1.0
    """Divisor of what arrives late."""
    clip: float | None = 1.0
    """Largest element of the outer momentum; None does not clip."""

    def __post_init__(self):
        AveragingBase.__post_init__(self)
        if not self.penalty >= 1.0:
            raise ValueError(f"replicas.penalty={self.penalty} must be at least 1")
        if self.clip is not None and not self.clip > 0.0:
            raise ValueError(f"replicas.clip={self.clip} must be above 0, or None")

    def build(self, facts: TrainingFacts) -> Method:
        """Return the method; see the base class."""
        del facts
        delay = self.every if self.delay is None else self.delay
        return Method(
            timing=ExchangeTiming(every=self.every, delay=delay),
            codec=lambda leaf: plain(),
            exchange=lambda leaf: mean() if is_small(leaf) else permuted_mean(),
            outer=optax.chain(
                optax.scale(1.0 / self.penalty),
                clipped_momentum(self.momentum, self.clip),
                optax.scale(-self.learning_rate),
            ),
            anchor="merged",
            weighting=weighting_of(self.weights),
        )


def clipped_momentum(decay: float, clip: float | None) -> optax.GradientTransformation:
    """Return momentum whose elements stay within +-clip.

    Args:
        decay: Factor on the momentum from one update to the next.
        clip: Largest element; None does not clip.
    """

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params

        def one(m: Any, u: Any) -> Any:
            m = decay * m + u
            return m if clip is None else jnp.clip(m, -clip, clip)

        momentum = jax.tree.map(one, state, updates)
        return momentum, momentum

    def init(params: Any) -> Any:
        return jax.tree.map(jnp.zeros_like, params)

    return optax.GradientTransformation(init, update)
