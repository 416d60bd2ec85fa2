# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Streaming DiLoCo: fragments in turn, in four bits, merged a step later (arXiv 2501.18512).

DiLoCo on one fragment at a time: layer l of a stack is in fragment l mod P, and fragments are sent
at different steps. A message is made of the parameters that enter a step and merged `delay` steps
later, so that it travels during a step: those that send are programs of their own, one for each
fragment, in which no conditional holds the exchange (`workers/programs.py`). A
worker keeps half of its own parameters at a merge. Compiled for v5e:2x4 (4 layers of width 512,
libtpu 0.0.42, jax 0.10) its permutes, of up to 0.5 MB, end before the products: they lie beside
conversions, merges and one another.

Messages are encoded by `codecs/e3m0.py` without error feedback, and averaged in
float32. The slow parameters advance when a fragment is merged. The outer learning rate, 0.4, is not
certain.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

import optax

from jaxmoe.contrib.slow_links.base import AveragingBase
from jaxmoe.contrib.slow_links.codec import Codec, plain
from jaxmoe.contrib.slow_links.codecs.e3m0 import e3m0
from jaxmoe.contrib.slow_links.exchange import Exchange, gathered_mean, mean
from jaxmoe.contrib.slow_links.fragments import Leaf, TrainingFacts, is_small
from jaxmoe.contrib.slow_links.method import Method
from jaxmoe.contrib.slow_links.timing import ExchangeTiming
from jaxmoe.contrib.slow_links.weighting import weighting_of


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StreamingConfig(AveragingBase):
    """Averages one fragment of the parameters at a time, in four bits, merged a step later."""

    name: ClassVar[str] = "streaming"

    every: int = 100
    """Steps between two exchanges of one fragment."""
    fragments: int = 4
    """Fragments that are sent at different steps; a divisor of the number of layers."""
    delay: int = 1
    """Steps between sending a fragment and merging it; 0 waits for the message."""
    keep: float = 0.5
    """Share of its own parameters that a worker keeps at a merge; 1 never merges."""
    codec: Literal["e3m0", "float32"] = "e3m0"
    """Encoding of messages; routers and norms travel as float32."""
    learning_rate: float = 0.4
    """Learning rate of the outer optimiser."""
    momentum: float = 0.9
    """Nesterov momentum of the outer optimiser."""

    def build(self, facts: TrainingFacts) -> Method:
        """Return the method; see the base class."""
        del facts

        def is_plain(leaf: Leaf) -> bool:
            return self.codec == "float32" or is_small(leaf)

        def codec(leaf: Leaf) -> Codec:
            return plain() if is_plain(leaf) else e3m0()

        def exchange(leaf: Leaf) -> Exchange:
            return mean() if is_plain(leaf) else gathered_mean()

        return Method(
            timing=ExchangeTiming(
                every=self.every, fragments=self.fragments, delay=self.delay, keep=self.keep
            ),
            codec=codec,
            exchange=exchange,
            outer=optax.sgd(self.learning_rate, self.momentum, nesterov=True),
            weighting=weighting_of(self.weights),
        )
