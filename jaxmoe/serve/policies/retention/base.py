# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Interface of retention policies: what an instance does with pages when they run out."""

from __future__ import annotations

import abc
import dataclasses
from typing import ClassVar

from jaxmoe.serve.facts import Facts


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RetentionConfig(abc.ABC):
    """A retention policy."""

    name: ClassVar[str]

    @abc.abstractmethod
    def facts(self, facts: Facts) -> Facts:
        """Return the facts of an instance with the victim, the groups and the copies of the policy.

        Args:
            facts: Sizes and abilities of the instance.
        """
