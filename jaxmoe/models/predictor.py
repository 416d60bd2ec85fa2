# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Defines the socket `Predictor`: modules after the last layer, beside the head of a model.

    scan      path, kind and numbers of the layers of the modules, behind those of the model
    declare   their parameters, while the model's are declared

The logits of the model do not depend on them. An objective trains them (`Objective.further_loss`),
generation and serving may draft with them. Routers of their layers have rows of the router state
behind those of the model's layers.

To add a predictor: a config that extends `Predictor`, and its row under `predictor` in
`jaxmoe/catalog/layers.py`.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from jaxmoe.models.stacks import Layer, Scan

if TYPE_CHECKING:
    from jaxmoe.execution import ExecutionConfig
    from jaxmoe.layers.records import Stream
    from jaxmoe.models.config import ModelConfig
    from jaxmoe.models.decode import HostPrograms


class Predictor(abc.ABC):
    """Base class of the configs of modules after the last layer."""

    __slots__ = ()

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]
    name: ClassVar[str]
    """Name in the registry and on the command line."""
    objective: ClassVar[str]
    """Name of the objective that trains the modules."""

    @abc.abstractmethod
    def check(self, model: ModelConfig) -> None:
        """Raise if a model cannot have the modules.

        Args:
            model: Model with them.

        Raises:
            ValueError: Names the field.
        """

    @abc.abstractmethod
    def scan(self, kinds: Sequence[Layer], num_moe: int) -> Scan:
        """Return the layers of the modules, whose name is the first part of their paths.

        Args:
            kinds: Kinds of the layers of the model; numbers follow theirs.
            num_moe: MoE layers of the model; numbers of MoE layers follow them.
        """

    @abc.abstractmethod
    def declare(self, model: ModelConfig, execution: ExecutionConfig, stream: Stream) -> None:
        """Declare the parameters; called in the module of the model while it is initialised.

        Args:
            model: Model with the modules.
            execution: How the model is computed.
            stream: Embedded tokens.
        """

    @abc.abstractmethod
    def drafts(self) -> HostPrograms:
        """Return the programs of one generation after the other, in which the modules draft."""

    @abc.abstractmethod
    def drafter(self, model: ModelConfig, execution: ExecutionConfig, sizes: Any) -> Any:
        """Return what drafts in serving: a `jaxmoe.serve.device.drafting.ServedDrafter`.

        Args:
            model: Model with the modules.
            execution: How it is served.
            sizes: `jaxmoe.serve.device.config.ExecutorConfig` without drafts.

        Raises:
            ValueError: The modules cannot draft for this model.
        """

    @abc.abstractmethod
    def family(self, family: Any) -> Any:
        """Return a family of `transformers` whose config and tensors have the modules.

        Args:
            family: `jaxmoe.checkpoint.huggingface.family.Family` without them.

        Raises:
            ValueError: It has no names for them.
        """
