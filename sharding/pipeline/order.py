# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Base class of the orders of the micro-batches on the stages of a pipeline."""

from __future__ import annotations

import abc
from typing import ClassVar

from sharding.pipeline.schedule import Paths, Schedule


class PipelineOrder(abc.ABC):
    """Order of the micro-batches on the stages of a pipeline."""

    __slots__ = ()

    name: ClassVar[str]
    """Name in configs and flags."""

    @property
    @abc.abstractmethod
    def chunks(self) -> int:
        """Chunks of layers on each stage."""

    @property
    @abc.abstractmethod
    def is_deferred(self) -> bool:
        """Whether gradients of weights are deferred."""

    @abc.abstractmethod
    def check(self, stages: int, micro_batches: int) -> None:
        """Refuse numbers that the order cannot have.

        Args:
            stages: execution.mesh.stage.
            micro_batches: training.accumulation.

        Raises:
            ValueError: It cannot.
        """

    @abc.abstractmethod
    def check_paths(self) -> None:
        """Refuse micro-batches that leave out groups.

        Raises:
            ValueError: The order has none for them.
        """

    @abc.abstractmethod
    def schedule(self, stages: int, micro_batches: int, paths: Paths | None = None) -> Schedule:
        """Return the table of one step.

        Args:
            stages: Stages of the pipeline.
            micro_batches: Micro-batches of a step.
            paths: Groups that micro-batches pass through; None for all in order.

        Raises:
            ValueError: The order has none for these paths.
        """
