# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""muP and muP++ for Muon: the second one is the baseline of the HyperP paper.

m = D / D0; the law of the batch multiplies every rate, in muP++ that of the depth as well.

                 initial values          group   learning rate   weight decay
                                                                 muP    muP++
    embedding    1e-4; 0.02 tied         adamw   1               1      0
    head         0.02                    adamw   1               1      0
    hidden       uniform, 1/sqrt(3 fan)  muon    1 (*)           1/m    1/m, independent
    experts      uniform, 1/sqrt(3 fan)  muon    1 (*)           1/m    1/m, independent
    router       uniform, 1/sqrt(3 fan)  muon    1 (*)           1/m    1/m, independent
    vectors      1                       adamw   1               1      0
    zeros        0                       adamw   1/sqrt(3 D)     0      0

    (*) times sqrt(fan_out / fan_in) of each matrix, which is Muon's own scale (`optimizer.scale`)
    logits times 1/m, router logits as they are; attention logits times sqrt(H0) / H, H0 = 128
    residual branches: muP as they are, muP++ times 1/sqrt(2 L)

Tuned in the paper: eta0 0.02, weight decay 1e-3. Sources: arXiv 2603.28743, Table 1 for muP, and
ArchScale (c2ec1d6, read and not run) for the rest. For muP the code decays vectors, embedding and
head by 1/m too. For muP++ it writes L0 / L in place of 1/m; on the ladder, where width is 128 L,
they are one number, and the rule it follows (arXiv 2512.05620) speaks of width. Zero-started router
matrices are decided here; see `zero_start_rate`.

`token_exponent` (0 in the paper) makes the control that it lacks: Muon with the token law, which
tells the law from the sphere.

To add a variant: a config with its own column, and a row in tests/jaxmoe/scaling/test_scaling.py.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from jaxmoe.models.config import ForwardMultipliers, ModelConfig
from jaxmoe.parameters import Hyperparameters
from jaxmoe.scaling import laws
from jaxmoe.scaling.budget import BasePoint, Budget
from jaxmoe.scaling.parameterization import Parameterization
from jaxmoe.scaling.tables import (
    BASE_HEAD_DIM,
    HEAD_STD,
    KAIMING,
    RoleTable,
    attention_scale,
    check_exponents,
    embedding_std,
    fixed,
    table_of,
    with_multipliers,
    zero_start_rate,
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MuPMuonConfig:
    """muP for Muon, without a law of depth."""

    name: ClassVar[str] = "mup_muon"

    batch_exponent: float = laws.BATCH_EXPONENT
    """The rate grows as (batch / base batch) to this power; 0: it does not."""
    token_exponent: float = 0.0
    """The rate falls as (tokens / base tokens) to this power; 0: it does not."""
    base_head_dim: int = BASE_HEAD_DIM
    """Width of a head at which attention is scaled as usual."""
    has_independent_decay: bool = False
    """Weight decay of Muon's matrices follows the schedule alone, and not the learning rate."""

    __post_init__ = check_exponents

    def build(self, model: ModelConfig, budget: Budget, base: BasePoint) -> Parameterization:
        """See `mup_muon`."""
        return mup_muon(model, budget, base, self)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MuPPlusPlusMuonConfig:
    """muP++ for Muon, the baseline of the HyperP paper."""

    name: ClassVar[str] = "mup_plus_plus_muon"

    batch_exponent: float = laws.BATCH_EXPONENT
    """The rate grows as (batch / base batch) to this power; 0: it does not."""
    depth_exponent: float = laws.DEPTH_EXPONENT
    """The rate falls as (depth / base depth) to this power; 0: it does not."""
    token_exponent: float = 0.0
    """The rate falls as (tokens / base tokens) to this power; HyperP's is 0.32."""
    residual_exponent: float = laws.RESIDUAL_EXPONENT
    """Residual branches are multiplied by (2 depth) to minus this power; 0: by 1."""
    base_head_dim: int = BASE_HEAD_DIM
    """Width of a head at which attention is scaled as usual."""
    has_independent_decay: bool = True
    """Weight decay of Muon's matrices follows the schedule alone, and not the learning rate."""

    __post_init__ = check_exponents

    def build(self, model: ModelConfig, budget: Budget, base: BasePoint) -> Parameterization:
        """See `mup_plus_plus_muon`."""
        return mup_plus_plus_muon(model, budget, base, self)


def mup_muon(
    model: ModelConfig, budget: Budget, base: BasePoint, options: MuPMuonConfig | None = None
) -> Parameterization:
    """muP for Muon.

    Args:
        model: what is trained.
        budget: tokens of the run and of a step.
        base: where the learning rate was tuned; its width, and what the laws ask for.
        options: exponents; the defaults when None.

    Raises:
        ValueError: a number of the base point is missing, or the model has multipliers of its own.
    """
    options, rule = options or MuPMuonConfig(), "mup_muon"
    rate = laws.batch_factor(budget, base, options.batch_exponent, rule)
    rate *= laws.token_factor(budget, base, options.token_exponent, rule)
    wider = model.embed_dim / base.number("embed_dim", rule)
    multipliers = ForwardMultipliers(
        logits=1.0 / wider, attention_scale=attention_scale(model, options.base_head_dim)
    )
    is_independent = options.has_independent_decay
    return Parameterization(
        model=with_multipliers(model, multipliers, rule),
        roles=_table(model, rate, wider, outer_decay=1.0, is_independent=is_independent),
    )


def mup_plus_plus_muon(
    model: ModelConfig,
    budget: Budget,
    base: BasePoint,
    options: MuPPlusPlusMuonConfig | None = None,
) -> Parameterization:
    """muP++ for Muon; see `mup_muon`."""
    options, rule = options or MuPPlusPlusMuonConfig(), "mup_plus_plus_muon"
    rate = laws.batch_factor(budget, base, options.batch_exponent, rule)
    rate *= laws.depth_factor(model.num_layers, base, options.depth_exponent, rule)
    rate *= laws.token_factor(budget, base, options.token_exponent, rule)
    wider = model.embed_dim / base.number("embed_dim", rule)
    multipliers = ForwardMultipliers(
        residual=laws.residual_multiplier(model.num_layers, options.residual_exponent),
        logits=1.0 / wider,
        attention_scale=attention_scale(model, options.base_head_dim),
    )
    is_independent = options.has_independent_decay
    return Parameterization(
        model=with_multipliers(model, multipliers, rule),
        roles=_table(model, rate, wider, outer_decay=0.0, is_independent=is_independent),
    )


def _table(
    model: ModelConfig, rate: float, wider: float, *, outer_decay: float, is_independent: bool
) -> RoleTable:
    def outer(row: Hyperparameters) -> Hyperparameters:
        return dataclasses.replace(
            row, learning_rate_multiplier=rate, weight_decay_multiplier=outer_decay
        )

    matrix = dataclasses.replace(
        KAIMING,
        group="muon",
        learning_rate_multiplier=rate,
        weight_decay_multiplier=1.0 / wider,
        has_independent_decay=is_independent,
    )
    zeros = Hyperparameters(
        learning_rate_multiplier=rate * zero_start_rate(model), weight_decay_multiplier=0.0
    )
    return table_of(
        embedding=outer(fixed(embedding_std(model))),
        head=outer(fixed(HEAD_STD)),
        hidden=matrix,
        router=matrix,
        vectors=outer(Hyperparameters()),
        zeros=zeros,
    )
