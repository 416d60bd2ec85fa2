# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Defines what a run asks of the layers that micro-batches leave out, or take in another order."""

from __future__ import annotations

import abc
import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

from jaxmoe.execution import ExecutionConfig
from jaxmoe.training.estimators.base import Gradients

if TYPE_CHECKING:
    from jaxmoe.training.step import Step


class Skipping(abc.ABC):
    """Base class of the configs by which micro-batches pass through some of the layers."""

    __slots__ = ()

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]
    name: ClassVar[str]
    """Name in the registry and on the command line."""

    @property
    @abc.abstractmethod
    def gradients(self) -> Gradients:
        """How a step gets its gradient, whose `paths` are those of the micro-batches."""

    @property
    @abc.abstractmethod
    def share_left_out(self) -> float:
        """Share of the layers that a micro-batch leaves out."""

    @abc.abstractmethod
    def describe(self, execution: ExecutionConfig, accumulation: int) -> str:
        """Return what micro-batches leave out or swap, and the time that this saves, as text.

        Args:
            execution: Schedule, and mesh with every size filled in.
            accumulation: Micro-batches of a step.
        """

    @abc.abstractmethod
    def row(self, execution: ExecutionConfig, accumulation: int) -> dict[str, Any]:
        """Return what micro-batches leave out, and the time that this saves, for the summary.

        Args:
            execution: Schedule, and mesh with every size filled in.
            accumulation: Micro-batches of a step.
        """

    @abc.abstractmethod
    def check(self, step: Step) -> None:
        """Check, before anything is traced, that a model can be trained with it.

        Args:
            step: Model, micro-batches and form of the balance losses, on a mesh with every size
                filled in.

        Raises:
            ValueError: A feature needs every layer of every micro-batch, or the layers do not fit.
        """
