# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Base of the configs of methods that exchange gradients in every step."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from typing import ClassVar, Literal

from jaxmoe.contrib.slow_links.base import WorkersBase
from jaxmoe.contrib.slow_links.fragments import Leaf, TrainingFacts
from jaxmoe.contrib.slow_links.gradient_method import GradientMethod

STACKS = ("layers", "other_layers", "experts")
"""Logical axes that count matrices."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GradientBase(WorkersBase):
    """A method of training in which workers exchange gradients in every step."""

    exchanges: ClassVar[Literal["nothing", "parameters", "gradients"]] = "gradients"

    @abstractmethod
    def build(self, facts: TrainingFacts) -> GradientMethod:
        """Return the method for a run.

        Args:
            facts: Parameters, workers and steps of the run.
        """


def stacked_dimensions(leaf: Leaf) -> int:
    """Return the number of leading dimensions of a parameter that count matrices."""
    count = 0
    while count < len(leaf.axes) and leaf.axes[count] in STACKS:
        count += 1
    return count
