# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Socket `WeightStorage`: how weights that are not floating lie in a checkpoint.

    target(...)      shapes, dtypes and layout of the parameters, to which a checkpoint is restored
    floating(...)    parameters as the model computes with them

`execution.precision.weights` names the member; formats without one of their own are `rounded`.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from jax.sharding import Mesh

from jaxmoe.catalog import choice, names
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.quantize import abstract_params
from jaxmoe.parameters import ParameterTable


class WeightStorage(abc.ABC):
    """Base class of the members."""

    name: ClassVar[str]
    """Name in the catalogue."""

    @abc.abstractmethod
    def target(
        self,
        table: ParameterTable,
        execution: ExecutionConfig,
        mesh: Mesh,
        arrays: Callable[[], Mapping[str, Mapping[str, Any]]],
    ) -> Any:
        """Return shapes, dtypes and layout of the parameters.

        Args:
            table: Parameters of the model.
            execution: Precision and rules.
            mesh: Mesh of the layout.
            arrays: Function that reads shapes and dtypes in the manifest of the checkpoint, by
                path.
        """

    @abc.abstractmethod
    def floating(self, table: ParameterTable, params: Any, dtype: Any, mesh: Mesh) -> Any:
        """Return restored parameters as the model computes with them.

        Args:
            table: Parameters of the model.
            params: Restored parameters.
            dtype: Dtype of floating arrays.
            mesh: Mesh of the layout.
        """


@dataclasses.dataclass(frozen=True, slots=True)
class RoundedWeights(WeightStorage):
    """Values and scales of matrices, with which the model computes."""

    name: ClassVar[str] = "rounded"

    def target(
        self,
        table: ParameterTable,
        execution: ExecutionConfig,
        mesh: Mesh,
        arrays: Callable[[], Mapping[str, Mapping[str, Any]]],
    ) -> Any:
        """Return the target of `jaxmoe.models.quantize`."""
        del arrays
        precision = execution.precision
        return abstract_params(
            table,
            precision.weights,
            precision.parameter_dtype,
            execution.axis_rules,
            mesh,
            precision.mixed,
        )

    def floating(self, table: ParameterTable, params: Any, dtype: Any, mesh: Mesh) -> Any:
        """Return the parameters as they are."""
        del table, dtype, mesh
        return params


def weight_storage(weights: str) -> WeightStorage:
    """Return how weights of a format lie in a checkpoint.

    Args:
        weights: `execution.precision.weights`, not floating.
    """
    kind = "weight_storage"
    return choice(kind, weights if weights in names(kind) else RoundedWeights.name)()
