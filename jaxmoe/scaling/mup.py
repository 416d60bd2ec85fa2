# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""muP and muP++ with AdamW: learning rates that hold across width, and across depth as well.

m = D / D0; the law of the batch, sqrt(B / B0), multiplies every rate, and in muP++ that of the
depth, sqrt(L0 / L), too.

                 initial values          learning rate   weight decay
                                                         muP   muP++
    embedding    1e-4; 0.02 tied         1               1     0
    head         0.02                    1               1     0
    hidden       uniform, 1/sqrt(3 fan)  1/m             1     1
    experts      uniform, 1/sqrt(3 fan)  1/m             1     1
    router       0.02                    1/m             1     1
    vectors      1                       1               1     0
    zeros        0                       1/m             1     1

    logits and router logits times 1/m; attention logits times sqrt(H0) / H, with H0 = 128
    residual branches: muP as they are, muP++ times 1/sqrt(2 L)

Source: ArchScale (c2ec1d6), read and not run; its names are `_ori_mup` and `mup`. The table of
muP++ in its own paper (arXiv 2507.06607) was not to be had. Of muP proper (arXiv 2203.03466) it
keeps the rates and the output multiplier, and not the epsilon of Adam, which no row here changes.
The router is scaled down twice, by its rate and by its multiplier: as in the code. Zero-started
router matrices are decided here: as routers.

The decay is coupled (times the learning rate). muP++ has the independent one of ArchScale's
`v2scale` runs as an option; give a small optimizer.weight_decay with it (1e-3), for each step then
takes that share of a weight. Weight decay is not scaled with any size.

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
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MuPConfig:
    """muP with AdamW: hidden rates fall as 1/width."""

    name: ClassVar[str] = "mup"

    batch_exponent: float = laws.BATCH_EXPONENT
    """The rate grows as (batch / base batch) to this power; 0: it does not."""
    token_exponent: float = 0.0
    """The rate falls as (tokens / base tokens) to this power; 0: it does not."""
    base_head_dim: int = BASE_HEAD_DIM
    """Width of a head at which attention is scaled as usual."""

    __post_init__ = check_exponents

    def build(self, model: ModelConfig, budget: Budget, base: BasePoint) -> Parameterization:
        """See `mup`."""
        return mup(model, budget, base, self)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MuPPlusPlusConfig:
    """muP++ with AdamW: muP with 1/sqrt(depth) in the rates and in the residual branches."""

    name: ClassVar[str] = "mup_plus_plus"

    batch_exponent: float = laws.BATCH_EXPONENT
    """The rate grows as (batch / base batch) to this power; 0: it does not."""
    depth_exponent: float = laws.DEPTH_EXPONENT
    """The rate falls as (depth / base depth) to this power; 0: it does not."""
    token_exponent: float = 0.0
    """The rate falls as (tokens / base tokens) to this power; 0: it does not."""
    residual_exponent: float = laws.RESIDUAL_EXPONENT
    """Residual branches are multiplied by (2 depth) to minus this power; 0: by 1."""
    base_head_dim: int = BASE_HEAD_DIM
    """Width of a head at which attention is scaled as usual."""
    has_independent_decay: bool = False
    """Weight decay follows the schedule alone, and not the learning rate."""

    __post_init__ = check_exponents

    def build(self, model: ModelConfig, budget: Budget, base: BasePoint) -> Parameterization:
        """See `mup_plus_plus`."""
        return mup_plus_plus(model, budget, base, self)


def mup(
    model: ModelConfig, budget: Budget, base: BasePoint, options: MuPConfig | None = None
) -> Parameterization:
    """muP with AdamW.

    Args:
        model: what is trained.
        budget: tokens of the run and of a step.
        base: where the learning rate was tuned; its width, and what the laws ask for.
        options: exponents; the defaults when None.

    Raises:
        ValueError: a number of the base point is missing, or the model has multipliers of its own.
    """
    options = options or MuPConfig()
    rate = laws.batch_factor(budget, base, options.batch_exponent, "mup")
    rate *= laws.token_factor(budget, base, options.token_exponent, "mup")
    wider = model.embed_dim / base.number("embed_dim", "mup")
    multipliers = ForwardMultipliers(
        logits=1.0 / wider,
        router=1.0 / wider,
        attention_scale=attention_scale(model, options.base_head_dim),
    )
    return Parameterization(
        model=with_multipliers(model, multipliers, "mup"),
        roles=_table(model, rate, wider, outer_decay=1.0, is_independent=False),
    )


def mup_plus_plus(
    model: ModelConfig, budget: Budget, base: BasePoint, options: MuPPlusPlusConfig | None = None
) -> Parameterization:
    """muP++ with AdamW; see `mup`."""
    options, rule = options or MuPPlusPlusConfig(), "mup_plus_plus"
    rate = laws.batch_factor(budget, base, options.batch_exponent, rule)
    rate *= laws.depth_factor(model.num_layers, base, options.depth_exponent, rule)
    rate *= laws.token_factor(budget, base, options.token_exponent, rule)
    wider = model.embed_dim / base.number("embed_dim", rule)
    multipliers = ForwardMultipliers(
        residual=laws.residual_multiplier(model.num_layers, options.residual_exponent),
        logits=1.0 / wider,
        router=1.0 / wider,
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

    def inner(row: Hyperparameters) -> Hyperparameters:
        return dataclasses.replace(
            row, learning_rate_multiplier=rate / wider, has_independent_decay=is_independent
        )

    return table_of(
        embedding=outer(fixed(embedding_std(model))),
        head=outer(fixed(HEAD_STD)),
        hidden=inner(KAIMING),
        router=inner(fixed(HEAD_STD)),
        vectors=outer(Hyperparameters()),
        zeros=inner(Hyperparameters()),
    )
