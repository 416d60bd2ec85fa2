# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Choice `training.average`: a mean of the trained parameters over the steps of a run.

To add an average: a config class that extends `Average`, its row under `average` in
jaxmoe/catalog/runs.py.
"""

from __future__ import annotations

import abc
from typing import ClassVar

from jaxmoe.catalog import Registry
from jaxmoe.training.parts.base import StepPart


class Average(abc.ABC):
    """Base class of the configs of averages."""

    __slots__ = ()

    name: ClassVar[str]
    """Key in the registry."""

    @abc.abstractmethod
    def step_part(self, steps: int) -> StepPart:
        """Return the part of a step that keeps the average.

        Args:
            steps: Step after which the average takes the place of the parameters.
        """


AVERAGES = Registry("average")
