# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Defines the base class of the configs of all methods of training with workers."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal

from jaxmoe.optim.groups import Optimizer


class ReplicasKind(ABC):
    """Base class of the configs of all methods."""

    __slots__ = ()

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]
    name: ClassVar[str]
    """Name in the registry and on the command line."""
    exchanges: ClassVar[Literal["nothing", "parameters", "gradients"]]
    """What workers send one another."""

    @abstractmethod
    def num_workers(self, places: int) -> int:
        """Return the number of workers.

        Args:
            places: Size of mesh.replica.
        """

    def adapt(self, optimizer: Optimizer, steps: int) -> Optimizer:
        """Return the optimiser that the method needs in place of the one of the run.

        Args:
            optimizer: Optimiser of the run.
            steps: Steps of the run.

        Raises:
            ValueError: The method cannot be used with the optimiser.
        """
        del steps
        return optimizer
