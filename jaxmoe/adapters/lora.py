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

from jaxmoe.adapters.base import Adapter
from jaxmoe.adapters.factors import MatrixFactorsConfig, factor_rows
from jaxmoe.field_docs import with_field_docs
from jaxmoe.parameters import ParameterSpec
from sharding.rules import LogicalAxisRules


@with_field_docs
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LoraConfig(MatrixFactorsConfig):
    """A low-rank addition to each target; all else is frozen."""

    name: ClassVar[str] = "lora"
    can_go_on: ClassVar[bool] = True

    alpha: float = 32.0
    """The addition is multiplied with alpha over the inner width of the matrix's own factors: rank,
    and for routed experts expert_rank, whose additions are larger by rank / expert_rank."""
    is_rank_stabilized: bool = False
    """Whether the addition is multiplied with alpha / sqrt(rank) instead."""

    def rows_of(
        self, row: ParameterSpec, is_adapted: tuple[bool, ...], rules: LogicalAxisRules
    ) -> list[ParameterSpec]:
        """Return the rows of the factors of a matrix; see `MatrixFactorsConfig.rows_of`."""
        scales = tuple(self.scale_of(row) if has_adapter else 0.0 for has_adapter in is_adapted)
        return factor_rows(row, self.rank_of(row), scales, rules)

    def scale_of(self, row: ParameterSpec) -> float:
        """Return the factor of the addition to a target."""
        rank = self.rank_of(row)
        return self.alpha / (math.sqrt(rank) if self.is_rank_stabilized else rank)


def lora_of(adapter: Adapter | None) -> LoraConfig | None:
    """Return an adapter that adds products of two factors alone; None for any other."""
    return adapter if isinstance(adapter, LoraConfig) else None
