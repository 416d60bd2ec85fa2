# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""LoRA: trains a low-rank addition to matrices (arXiv 2106.09685).

    y = x W + s (x A) B        A [in r] normal with variance 1/in, B [r out] zeros
    s = alpha / r, or alpha / sqrt(r) (rank-stabilised, arXiv 2312.03732)

Each expert has factors of its own. The initial A of PEFT is uniform of the same class of variance,
not of the same bits.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

from jaxmoe.adapters.base import Adapter, Layers, TargetsConfig, frozen, layers_of
from jaxmoe.declarations import Declaration
from jaxmoe.parameters import FROZEN, Hyperparameters, ParameterSpec, ParameterTable
from sharding import axes as ax
from sharding.rules import LogicalAxisRules

_TRAINED = Hyperparameters(weight_decay_multiplier=0.0)
_FIXED = Hyperparameters(weight_decay_multiplier=0.0, group=FROZEN)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LoraConfig(Adapter):
    """A low-rank addition to each target; all else is frozen."""

    name: ClassVar[str] = "lora"
    has_factors: ClassVar[bool] = True

    rank: int = 16
    """Inner width of the factors."""
    expert_rank: int | None = None
    """Inner width for each routed expert; rank / experts, at least 1, when None."""
    alpha: float = 32.0
    """The addition is multiplied with alpha / rank."""
    is_rank_stabilized: bool = False
    """Whether it is multiplied with alpha / sqrt(rank) instead."""
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
        return f"lora rank {self.rank}, alpha {self.alpha:g}, on {' '.join(self.targets.roles)}"

    def table(
        self, base: ParameterTable, rules: LogicalAxisRules, layers: Layers
    ) -> ParameterTable:
        """Return the table with frozen rows and the factors; see `Adapter.table`."""
        targets = [
            row for row in base if self.targets.has(row) and row.declaration.matrix is not None
        ]
        self.targets.check_found(targets, base)
        rows = [frozen(row) for row in base]
        for row in targets:
            is_adapted = self.targets.layers_in(layers_of(row, layers))
            if any(is_adapted):
                rows += _factors(row, self.rank_of(row), self.scale_of(row), is_adapted, rules)
        if len(rows) == len(base):
            raise ValueError(
                f"adapter.targets.layers={self.targets.layers} names no layer with"
                f" {' or '.join(self.targets.roles)}: layers are numbered from 0"
            )
        return ParameterTable(tuple(sorted(rows, key=lambda row: row.path)))

    def rank_of(self, row: ParameterSpec) -> int:
        """Return the inner width of the factors of a target."""
        if ax.EXPERTS not in row.declaration.axes:
            return self.rank
        if self.expert_rank is not None:
            return self.expert_rank
        return max(1, self.rank // row.shape[row.declaration.axes.index(ax.EXPERTS)])

    def scale_of(self, row: ParameterSpec) -> float:
        """Return the factor of the addition to a target."""
        rank = self.rank_of(row)
        return self.alpha / (math.sqrt(rank) if self.is_rank_stabilized else rank)


def _factors(
    row: ParameterSpec, rank: int, scale: float, is_adapted: list[bool], rules: LogicalAxisRules
) -> list[ParameterSpec]:
    """Return the rows of the factors of one parameter, and of their scale in each layer."""
    given = row.declaration
    assert given.matrix is not None  # targets are matrices
    inputs, outputs = (len(dims) for dims in given.matrix)
    batch = len(given.shape) - inputs - outputs
    first, last = slice(0, batch + inputs), slice(batch + inputs, None)
    down = Declaration(
        shape=(*given.shape[first], rank),
        axes=(*given.axes[first], ax.RANK),
        role="adapter",
        matrix=(tuple(range(-inputs - 1, -1)), (-1,)),
    )
    up = Declaration(
        shape=(*given.shape[:batch], rank, *given.shape[last]),
        axes=(*given.axes[:batch], ax.RANK, *given.axes[last]),
        role="adapter",
        matrix=((-outputs - 1,), tuple(range(-outputs, 0))),
        init="zeros",
    )
    scales = tuple(scale if one else 0.0 for one in is_adapted)
    is_stacked = given.is_stacked
    factor = Declaration(
        shape=(len(scales),) if is_stacked else (),
        axes=(given.axes[0],) if is_stacked else (),
        role="adapter",
        matrix=None,
        init=scales,
    )
    made = {"down": (down, _TRAINED), "up": (up, _TRAINED), "scale": (factor, _FIXED)}
    return [
        ParameterSpec(
            path=f"{row.path}:{name}",
            declaration=declaration,
            hyper=hyper,
            spec=rules.resolve(declaration.axes),
        )
        for name, (declaration, hyper) in made.items()
    ]
