# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""SparseLoCo in which workers with slow links send less than the others (arXiv 2601.02360).

Slow workers keep `slow_kept` numbers of a tile, fast ones `kept`; everything else is `sparse`, the
error feedback of each worker included. Without slow workers, or with slow ones only, the method is
`sparse`.

Of the paper this is the selective compression of messages between workers. There a slow worker is
a pipeline, whose activations between stages are encoded by a subspace codec, and whose parameters
are projected back into the subspace after an exchange. Neither is built: a worker cannot be a
pipeline. Links are slow in one direction here: slow workers send less, and receive as much as
others. The default of `slow_kept`, a quarter of `kept`, is chosen here. Sites, which exchange
between jobs, cannot use the method.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from jaxmoe.contrib.slow_links.codec import Codec
from jaxmoe.contrib.slow_links.exchange import Exchange, mean
from jaxmoe.contrib.slow_links.fragments import Leaf, TrainingFacts, is_small
from jaxmoe.contrib.slow_links.method import Method
from jaxmoe.contrib.slow_links.methods.sparse import SparseConfig
from jaxmoe.contrib.slow_links.selective import SlowWorkers, selective_mean


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HeterogeneousConfig(SparseConfig):
    """Averages the largest changes, of which workers with slow links send fewer."""

    name: ClassVar[str] = "heterogeneous"

    slow: tuple[int, ...] = ()
    """Numbers of the workers with slow links, from 0."""
    slow_kept: int = 16
    """Numbers that slow workers keep of a tile of 4096; at most `kept`."""

    def __post_init__(self):
        SparseConfig.__post_init__(self)
        if not 1 <= self.slow_kept <= self.kept:
            raise ValueError(
                f"replicas.slow_kept={self.slow_kept} must be at least 1 and at most"
                f" replicas.kept={self.kept}"
            )
        if len(set(self.slow)) < len(self.slow):
            raise ValueError(f"replicas.slow={self.slow} has a worker twice")

    def build(self, facts: TrainingFacts) -> Method:
        """Return the method; see the base class.

        Raises:
            ValueError: A slow worker has a number that no worker has.
        """
        if not set(self.slow) <= set(range(facts.workers)):
            raise ValueError(
                f"replicas.slow={self.slow} must be numbers of workers, from 0 to"
                f" {facts.workers - 1}"
            )
        fast = SparseConfig.build(self, facts)
        slow = SparseConfig.build(dataclasses.replace(self, kept=self.slow_kept), facts)
        if len(self.slow) in (0, facts.workers):
            return slow if self.slow else fast

        def narrow(leaf: Leaf) -> Codec | None:
            return None if is_small(leaf) else slow.codec(leaf)

        def exchange(leaf: Leaf) -> Exchange:
            if is_small(leaf):
                return mean()
            return selective_mean(fast.codec(leaf), slow.codec(leaf), self.slow, self.reduce)

        return dataclasses.replace(
            fast, exchange=exchange, slow=SlowWorkers(workers=self.slow, codec=narrow)
        )
