# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Defines what adapters share that add a product of two factors to matrices.

y = x W + s (x A) B        A [in r], B [r out], s = alpha / r
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from flax import traverse_util

from jaxmoe.adapters.base import Adapter, Layers, TargetsConfig, frozen
from jaxmoe.declarations import Declaration
from jaxmoe.parameters import FROZEN, Hyperparameters, ParameterSpec, ParameterTable
from sharding import axes as ax
from sharding.rules import LogicalAxisRules

TRAINED = Hyperparameters(weight_decay_multiplier=0.0)
"""Numbers of a factor: normal with variance 1/fan_in, no weight decay."""
_FIXED = Hyperparameters(weight_decay_multiplier=0.0, group=FROZEN)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FactorsConfig(Adapter):
    """A low-rank addition to each target; all else is frozen."""

    rank: int = 16
    """Inner width of the factors."""
    expert_rank: int | None = None
    """Inner width for each routed expert; rank / experts, at least 1, when None."""
    alpha: float
    """The addition is multiplied with alpha over the inner width of the matrix's own factors."""
    targets: TargetsConfig = TargetsConfig()
    """Matrices that are adapted. Experts: --model.adapter.targets.roles expert_in expert_out."""

    def __post_init__(self):
        for field in ("rank", "expert_rank"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ValueError(f"adapter.{field}={value} must be at least 1")
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise ValueError(f"adapter.alpha={self.alpha} must be above 0")

    @property
    def words(self) -> str:
        """The adapter in words, for the header of a run."""
        targets = " ".join(self.targets.roles)
        return f"{self.name} rank {self.rank}, alpha {self.alpha:g}, on {targets}"

    def found(
        self, base: ParameterTable, layers: Layers
    ) -> list[tuple[ParameterSpec, tuple[bool, ...]]]:
        """Return the matrices with an addition, and for each which of its layers have one.

        Args:
            base: Table of the model without an adapter.
            layers: See `Adapter.table`.

        Raises:
            ValueError: The model has none of the targets.
        """
        return self.targets.matrices_in(base, layers)

    def rank_of(self, row: ParameterSpec) -> int:
        """Return the inner width of the factors of a target."""
        if ax.EXPERTS not in row.declaration.axes:
            return self.rank
        if self.expert_rank is not None:
            return self.expert_rank
        return max(1, self.rank // row.shape[row.declaration.axes.index(ax.EXPERTS)])


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MatrixFactorsConfig(FactorsConfig):
    """A low-rank addition to each target with factors of its own; all else is frozen."""

    def table(
        self, base: ParameterTable, rules: LogicalAxisRules, layers: Layers
    ) -> ParameterTable:
        """Return the table with frozen rows and the factors; see `Adapter.table`."""
        rows = [frozen(row) for row in base]
        for row, is_adapted in self.found(base, layers):
            rows += self.rows_of(row, is_adapted, rules)
        return ParameterTable(tuple(sorted(rows, key=lambda row: row.path)))

    @abc.abstractmethod
    def rows_of(
        self, row: ParameterSpec, is_adapted: tuple[bool, ...], rules: LogicalAxisRules
    ) -> list[ParameterSpec]:
        """Return the rows that an addition to a matrix has.

        Args:
            row: Row of the matrix.
            is_adapted: Whether each of its layers has one; of a matrix outside of layers, one True.
            rules: Logical to mesh axes.
        """


class MatrixParts(NamedTuple):
    """Where the matrices of a parameter have their inputs and outputs."""

    inputs: int
    """Dimensions of the inputs."""
    outputs: int
    """Dimensions of the outputs."""
    batch: int
    """Dimensions before both, which count matrices."""
    first: slice
    """Dimensions up to the last input."""
    last: slice
    """Dimensions of the outputs."""


def matrix_parts(declaration: Declaration) -> MatrixParts:
    """Return the parts of the matrices of a parameter.

    Args:
        declaration: A parameter with matrices.
    """
    assert declaration.matrix is not None  # targets are matrices
    inputs, outputs = (len(dims) for dims in declaration.matrix)
    batch = len(declaration.shape) - inputs - outputs
    return MatrixParts(
        inputs, outputs, batch, slice(0, batch + inputs), slice(batch + inputs, None)
    )


def factor_rows(
    row: ParameterSpec,
    rank: int,
    scales: tuple[float, ...],
    rules: LogicalAxisRules,
    *,
    hyper: Hyperparameters = TRAINED,
    up_init: Literal["zeros", "normal"] = "zeros",
) -> list[ParameterSpec]:
    """Return the rows `:down`, `:up` and `:scale` of a matrix.

    Args:
        row: Row of the matrix.
        rank: Inner width (r).
        scales: Factor of the addition in each layer, 0 where there is none.
        rules: Logical to mesh axes.
        hyper: Numbers of `:down` and `:up`.
        up_init: Initial values of `:up`.
    """
    declaration = row.declaration
    inputs, outputs, batch, first, last = matrix_parts(declaration)
    down = Declaration(
        shape=(*declaration.shape[first], rank),
        axes=(*declaration.axes[first], ax.RANK),
        role="adapter",
        matrix=(tuple(range(-inputs - 1, -1)), (-1,)),
    )
    up = Declaration(
        shape=(*declaration.shape[:batch], rank, *declaration.shape[last]),
        axes=(*declaration.axes[:batch], ax.RANK, *declaration.axes[last]),
        role="adapter",
        matrix=((-outputs - 1,), tuple(range(-outputs, 0))),
        init=up_init,
    )
    is_stacked = declaration.is_stacked
    factor = Declaration(
        shape=(len(scales),) if is_stacked else (),
        axes=(declaration.axes[0],) if is_stacked else (),
        role="adapter",
        matrix=None,
        init=scales,
    )
    made = {"down": (down, hyper), "up": (up, hyper), "scale": (factor, _FIXED)}
    return [own_row(f"{row.path}:{name}", *pair, rules) for name, pair in made.items()]


def values_row(
    row: ParameterSpec, rank: int, rules: LogicalAxisRules, init: Literal["zeros", "ones"]
) -> ParameterSpec:
    """Return the row `:values` of a matrix, a factor of each column of `:down`.

    Args:
        row: Row of the matrix.
        rank: Inner width (r).
        rules: Logical to mesh axes.
        init: Initial values.
    """
    batch = batch_of(row)
    declaration = Declaration(
        shape=(*batch, rank),
        axes=(*row.declaration.axes[: len(batch)], ax.RANK),
        role="adapter",
        matrix=None,
        init=init,
    )
    return own_row(f"{row.path}:values", declaration, TRAINED, rules)


def by_path(tree: Any) -> dict[str, Any]:
    """Return the leaves of nested dicts by path, in a dict of its own."""
    return dict(traverse_util.flatten_dict(tree, sep="/"))


def nest(flat: Mapping[str, Any]) -> Any:
    """Return the inverse of `by_path`."""
    return traverse_util.unflatten_dict(dict(flat), sep="/")


def batch_of(row: ParameterSpec) -> tuple[int, ...]:
    """Return the sizes of the dimensions of layers and experts of a matrix."""
    assert row.declaration.matrix is not None  # targets are matrices
    return row.shape[: len(row.shape) - sum(map(len, row.declaration.matrix))]


def own_row(
    path: str, declaration: Declaration, hyper: Hyperparameters, rules: LogicalAxisRules
) -> ParameterSpec:
    """Return the row of a parameter of an adapter.

    Args:
        path: Path, with a colon in its last part.
        declaration: Shape, axes, initial values.
        hyper: Rates and group.
        rules: Logical to mesh axes.
    """
    spec = rules.resolve(declaration.axes)
    return ParameterSpec(path=path, declaration=declaration, hyper=hyper, spec=spec)
