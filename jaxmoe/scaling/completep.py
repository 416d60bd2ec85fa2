# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""CompleteP with AdamW: rates, epsilon and decay that transfer across width and depth.

m = D / D0, n = L / L0, a = exponents.residual, 1 in CompleteP:

                 initial values   learning rate   weight decay   epsilon
    embedding    0.02             1               1              1/m
    head         0.02             1               1              1/m
    hidden       0.02 / sqrt(m)   n^(a-1) / m     m              1 / (m n^a)
    experts      as hidden
    router       as hidden
    vectors      1                n^(a-1)         0              1 / (m n^a)
    zeros        0                as hidden

    residual branches times n^-a, logits times 1/m, attention logits times 1/H in place of 1/sqrt(H)

The residual multiplier is relative: 1 at the base depth; muP++ and HyperP have 1/sqrt(2 L) there.
Coupled decay, lr * decay * w, with lr as 1/m and decay as m stays the same at every width.

Sources: arXiv 2505.01618, and the table in EleutherAI/nanoGPT-mup (model.py at 3904404). It has no
mixture of experts, gate or untied head: here experts and routers follow its hidden matrices (an
expert's fan_in is not used, because the width of an expert should scale with D), and the head its
embedding. Its final norm has the rate 1 and the embedding's epsilon; here all norms are one role
and follow those of the layers, which for a = 1 is the same rate.

CompleteP has no laws of batch and tokens: their exponents are 0, and can be set for comparisons.

To change a row: `_table` in `jaxmoe/scaling/completep.py`, and its case in
`tests/jaxmoe/scaling/test_scaling.py`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

from jaxmoe.models.config import ForwardMultipliers, ModelConfig
from jaxmoe.parameters import Hyperparameters
from jaxmoe.scaling import laws
from jaxmoe.scaling.parameterization import (
    BasePoint,
    Budget,
    Parameterization,
    ParameterizationBase,
)
from jaxmoe.scaling.tables import (
    RoleTable,
    fixed_normal,
    table_of,
    with_multipliers,
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CompletePExponents(laws.TokenExponents):
    """Powers of CompleteP's laws."""

    batch: float = 0.0
    """The rate grows as (batch / base batch) to this power; 0 turns the law off."""
    residual: float = 1.0
    """Residual branches are multiplied by (depth / base depth) to minus this power; 0.5 to 1."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CompletePConfig(ParameterizationBase):
    """CompleteP with AdamW: width and depth, with Adam's epsilon and the decay scaled too."""

    name: ClassVar[str] = "completep"

    exponents: CompletePExponents | None = None
    """Powers of the laws; None for those of the method."""
    matrix_std: float = 0.02
    """Standard deviation of the initial matrices at the base width."""

    def __post_init__(self):
        if not 0.0 < self.matrix_std < math.inf:
            raise ValueError(f"parameterization.matrix_std={self.matrix_std} must be above 0")

    def build(self, model: ModelConfig, budget: Budget, base: BasePoint) -> Parameterization:
        """Return the parameterisation of a model; see `completep`."""
        return completep(model, budget, base, self)

    @property
    def powers(self) -> CompletePExponents:
        """Powers of the laws."""
        return self.exponents or CompletePExponents()


def completep(
    model: ModelConfig, budget: Budget, base: BasePoint, options: CompletePConfig | None = None
) -> Parameterization:
    """Return CompleteP with AdamW.

    Args:
        model: Model to train.
        budget: Tokens of the run and of a step.
        base: Point at which the learning rate was tuned: its depth and width.
        options: Exponents; None is `CompletePConfig()`.

    Raises:
        ValueError: A number of the base point is missing, or the model has other multipliers.
    """
    options = options or CompletePConfig()
    rule = "completep"
    rate = laws.batch_factor(budget, base, options.powers.batch, rule)
    rate *= laws.token_factor(budget, base, options.powers.tokens, rule)
    wider = model.embed_dim / base.number("embed_dim", rule)
    deeper = model.num_layers / base.number("num_layers", rule)
    multipliers = ForwardMultipliers(
        residual=deeper**-options.powers.residual,
        logits=1.0 / wider,
        attention_scale=1.0 / model.attention.head_dim,
    )
    return Parameterization(
        model=with_multipliers(model, multipliers, rule),
        roles=_table(options, rate, wider, deeper),
    )


def _table(options: CompletePConfig, rate: float, wider: float, deeper: float) -> RoleTable:
    inner_rate = rate * deeper ** (options.powers.residual - 1.0)
    inner_epsilon = 1.0 / (wider * deeper**options.powers.residual)
    outer = dataclasses.replace(
        fixed_normal(options.matrix_std),
        learning_rate_multiplier=rate,
        epsilon_multiplier=1.0 / wider,
    )
    hidden = dataclasses.replace(
        fixed_normal(options.matrix_std / math.sqrt(wider)),
        learning_rate_multiplier=inner_rate / wider,
        weight_decay_multiplier=wider,
        epsilon_multiplier=inner_epsilon,
    )
    vectors = Hyperparameters(
        learning_rate_multiplier=inner_rate,
        weight_decay_multiplier=0.0,
        epsilon_multiplier=inner_epsilon,
    )
    return table_of(
        embedding=outer,
        head=outer,
        hidden=hidden,
        router=hidden,
        vectors=vectors,
        zeros=hidden,
    )
