# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""MuonH without laws of depth and tokens: the sphere alone, HyperP's control.

                 initial values          group    learning rate   weight decay
    embedding    1e-4; 0.02 tied         adamw    1               0
    head         0.02                    adamh    1               1
    hidden       normal, 1/sqrt(fan)     muonh    1               1
    experts      normal, 1/sqrt(fan)     muonh    1               1
    router       normal, 1/sqrt(fan)     muonh    1               1
    vectors      1                       adamw    1               0
    zeros        0                       adamw    1/sqrt(3 D)     0

    no forward multipliers; the law of the batch multiplies every rate

Tuned in the paper: eta0 0.01. After "Hyperball" (Wen et al.), as arXiv 2603.28743 describes its
baseline; the released code has no option for it, and the absolute radius is not published:
1/sqrt(fan) is the paper's wording. Embedding and head are those of the code's other runs.
Zero-started router matrices, decay and tied embeddings: as in `jaxmoe.scaling.hyperp`.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from jaxmoe import combinations
from jaxmoe.models.config import ModelConfig
from jaxmoe.parameters import Hyperparameters
from jaxmoe.scaling import laws
from jaxmoe.scaling.parameterization import (
    BasePoint,
    Budget,
    Parameterization,
    ParameterizationBase,
)
from jaxmoe.scaling.tables import (
    HEAD_STD,
    TiedEmbeddings,
    sphere_table,
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class VanillaMuonHConfig(ParameterizationBase):
    """MuonH alone, without laws of depth and tokens: HyperP's control."""

    name: ClassVar[str] = "muonh_vanilla"

    exponents: laws.BatchExponents | None = None
    """Powers of the laws; None for the usual one of the batch."""
    tied_embeddings: TiedEmbeddings = "refuse"
    """Treatment of a head tied to the embedding: an error, or AdamW without a sphere."""

    def build(self, model: ModelConfig, budget: Budget, base: BasePoint) -> Parameterization:
        """Return the parameterisation of a model; see `muonh_vanilla`."""
        return muonh_vanilla(model, budget, base, self)


def muonh_vanilla(
    model: ModelConfig, budget: Budget, base: BasePoint, options: VanillaMuonHConfig | None = None
) -> Parameterization:
    """Return MuonH without laws of depth and tokens.

    Args:
        model: Model to train, returned unchanged.
        budget: Tokens of the run and of a step.
        base: Point at which the learning rate was tuned: its batch.
        options: Exponent of the batch; None is `VanillaMuonHConfig()`.

    Raises:
        ValueError: The batch of the base point is missing, or the embeddings are tied.
    """
    options = options or VanillaMuonHConfig()
    rule = "muonh_vanilla"
    combinations.check(model=model, parameterization=options)
    powers = options.exponents or laws.BatchExponents()
    rate = laws.batch_factor(budget, base, powers.batch, rule)

    return Parameterization(
        model=model,
        roles=sphere_table(
            model, start=Hyperparameters(), head_std=HEAD_STD, inner=rate, outer=rate
        ),
    )
