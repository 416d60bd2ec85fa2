# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Interface of batching policies."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import ClassVar

from jaxmoe.serve.facts import Facts
from jaxmoe.serve.plan import Plan, PolicyTraits
from jaxmoe.serve.view import InstanceView

Batching = Callable[[InstanceView], Plan]
"""Returns the plan of the next step; an empty plan waits for something to happen."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BatchingConfig(abc.ABC):
    """A batching policy."""

    name: ClassVar[str]
    traits: ClassVar[PolicyTraits] = PolicyTraits()

    @abc.abstractmethod
    def build(self, facts: Facts) -> Batching:
        """Return the policy for one instance.

        Args:
            facts: Sizes and shapes of the instance.
        """

    def check(self, facts: Facts) -> None:
        """Raise if an instance lacks what the policy needs.

        Args:
            facts: Sizes and abilities of the instance.

        Raises:
            ValueError: Names the policy and what is missing.
        """
        traits = self.traits
        lacks = [
            ("lanes that share the device", traits.needs_partition and not facts.has_partitions),
            ("pieces that stop between layers", traits.needs_layers and not facts.has_layers),
            ("a model of the time of a step", traits.needs_cost and facts.cost is None),
        ]
        for what, is_lacking in lacks:
            if is_lacking:
                raise ValueError(
                    f"batching={self.name!r} needs {what}, which this executor does not have:"
                    " choose another batching policy, such as 'split_fuse', or simulate it"
                )
