# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Interface of batching policies."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import ClassVar, Final

from jaxmoe.serve.facts import Facts
from jaxmoe.serve.plan import Plan
from jaxmoe.serve.view import InstanceView

Batching = Callable[[InstanceView], Plan]
"""Returns the plan of the next step; an empty plan waits for something to happen."""


TIMES: Final = "the time of a step"
"""What a policy needs that asks how long a step takes."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BatchingConfig(abc.ABC):
    """A batching policy."""

    name: ClassVar[str]
    needs: ClassVar[frozenset[str]] = frozenset({"pages"})
    """Capabilities that the executor must have, see `Facts.capabilities`; `TIMES` asks for a model
    of the time of a step."""

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
        present = facts.capabilities | ({TIMES} if facts.cost is not None else set())
        if missing := self.needs - present:
            raise ValueError(
                f"batching={self.name!r} needs {' and '.join(sorted(missing))}, which this executor"
                " does not have: choose another batching policy, such as 'split_fuse', or simulate"
                " it"
            )
