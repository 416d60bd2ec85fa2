# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""How an engine queues requests, and what its instances compute."""

from __future__ import annotations

import abc
import dataclasses

from jaxmoe.serve.facts import Facts
from jaxmoe.serve.instance import Instance
from jaxmoe.serve.policies.batching import Batching, BatchingConfig, SplitFuseConfig
from jaxmoe.serve.policies.retention import LRURetentionConfig, RetentionConfig


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class InstancesConfig(abc.ABC):
    """What an engine asks about its instances."""

    max_waiting: int = 256
    """Requests in the queue of an instance at most; further ones are refused."""

    def __post_init__(self):
        if self.max_waiting < 1:
            raise ValueError(f"max_waiting={self.max_waiting} must be at least 1")

    @abc.abstractmethod
    def instance(self, facts: Facts) -> Instance:
        """Return an instance without requests.

        Args:
            facts: Sizes of its executor.

        Raises:
            ValueError: The executor is of another kind, or lacks what a policy needs.
        """

    @abc.abstractmethod
    def policy(self, facts: Facts) -> Batching:
        """Return what plans the steps of an instance.

        Args:
            facts: Sizes of the instance.
        """

    @abc.abstractmethod
    def describe(self, facts: Facts) -> str:
        """Return lines on the sizes of an instance.

        Args:
            facts: Sizes of the instance.
        """


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig(InstancesConfig):
    """How requests are queued and batched."""

    batching: BatchingConfig = SplitFuseConfig()
    """What a step computes."""
    retention: RetentionConfig = LRURetentionConfig()
    """Which pages a request gets, and what becomes of those of a preempted one."""
    shares_prefixes: bool = True
    """Whether requests of one tenant share the pages of equal beginnings."""

    def instance(self, facts: Facts) -> Instance:
        """Return an instance with pages."""
        if "pages" not in facts.capabilities:
            raise ValueError(
                f"this executor computes {', '.join(sorted(facts.capabilities))}, and EngineConfig"
                " plans pages: give the engine the config of its backend"
                " (jaxmoe.serve.backend.backend_of)"
            )
        facts = self.retention.facts(facts)
        self.batching.check(facts)
        return Instance(facts, self.batching.name, has_sharing=self.shares_prefixes)

    def policy(self, facts: Facts) -> Batching:
        """Return the batching policy."""
        return self.batching.build(facts)

    def describe(self, facts: Facts) -> str:
        """Return lines on the pages and the compiled shapes."""
        pieces = () if facts.shapes is None else facts.shapes.pieces
        shapes = [f"{facts.max_running}x1", *(f"+{number}x{size}" for number, size in pieces)]
        return (
            f"pages    {facts.num_pages} x {facts.page_size} tokens, {facts.max_length} of a"
            f" request\nshapes   {' '.join(shapes)}, batching {self.batching.name}, retention"
            f" {self.retention.name}"
        )
