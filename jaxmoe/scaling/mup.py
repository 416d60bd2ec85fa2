# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""muP and muP++, with AdamW or with Muon: rates that hold across width, and muP++ across depth.

m = D / D0; the batch law multiplies every rate, and in muP++ the depth law too.

    AdamW        initial values          learning rate   weight decay
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

    Muon         initial values          group   learning rate   weight decay
                                                                 muP    muP++
    embedding    1e-4; 0.02 tied         adamw   1               1      0
    head         0.02                    adamw   1               1      0
    hidden       uniform, 1/sqrt(3 fan)  muon    1 (*)           1/m    1/m, independent
    experts      uniform, 1/sqrt(3 fan)  muon    1 (*)           1/m    1/m, independent
    router       uniform, 1/sqrt(3 fan)  muon    1 (*)           1/m    1/m, independent
    vectors      1                       adamw   1               1      0
    zeros        0                       adamw   1/sqrt(3 D)     0      0

    (*) times sqrt(fan_out / fan_in) of each matrix, which is Muon's own scale (`optimizer.scale`)
    multipliers as for AdamW, except that router logits are not multiplied

Source for AdamW: ArchScale (c2ec1d6), read and not run; its names are `_ori_mup` and `mup`. The
table of muP++ in its own paper (arXiv 2507.06607) was not available. muP proper (arXiv 2203.03466)
also scales Adam's epsilon; no row here does. The router is scaled down twice, by its rate and by
its multiplier, as in the code. The decay is coupled (times the learning rate) unless
`has_independent_decay`, as in ArchScale's `v2scale` runs; use a small optimizer.weight_decay (1e-3)
with it, because each step then takes that share of a weight.

Sources for Muon: arXiv 2603.28743, Table 1 for muP, and ArchScale for the rest; muP++ with Muon is
the baseline of the HyperP paper, tuned there at eta0 0.02 and weight decay 1e-3. For muP the code
decays vectors, embedding and head by 1/m too. For muP++ it writes L0 / L in place of 1/m; on the
ladder, where width is 128 L, they are one number, and the rule it follows (arXiv 2512.05620) is
stated in width. `exponents.tokens` (0 in the paper) adds HyperP's token law to Muon, a control that
the paper lacks.

Rows for matrices that start at zero are this library's: with AdamW as routers, with Muon see
`zero_start_rate`.

To add a variant: a config derived from `WidthRule` or `DepthRule` in `jaxmoe/scaling/mup.py`, a row
of CASES in `tests/jaxmoe/scaling/test_scaling.py`.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar

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
    BASE_HEAD_DIM,
    HEAD_STD,
    KAIMING,
    RoleTable,
    attention_scale,
    check_head_width,
    embedding_std,
    fixed_normal,
    table_of,
    with_multipliers,
    zero_start_rate,
)


class MuPRule(ParameterizationBase):
    """Base of the configs of `mup`; what a config has no field for keeps the value here."""

    __slots__ = ()

    name: ClassVar[str]
    """Key in the registry."""
    is_muon: ClassVar[bool] = False
    """Whether hidden matrices are Muon's."""
    outer_decay: ClassVar[float] = 1.0
    """Multiplier of the weight decay of embedding, head and vectors."""
    base_head_dim: int
    has_independent_decay: bool = False

    def __post_init__(self):
        check_head_width(self.base_head_dim)

    def build(self, model: ModelConfig, budget: Budget, base: BasePoint) -> Parameterization:
        """Return the parameterisation of a model; see `mup`."""
        return mup(model, budget, base, self)

    @property
    @abc.abstractmethod
    def powers(self) -> laws.DepthExponents:
        """Powers of the laws; 0 for those that the rule does not have."""


class WidthRule(MuPRule):
    """Base of the rules without a law of depth."""

    __slots__ = ()

    exponents: laws.TokenExponents | None

    @property
    def powers(self) -> laws.DepthExponents:
        """Powers of the laws of batch and tokens."""
        given = self.exponents or laws.TokenExponents()
        return laws.DepthExponents(batch=given.batch, tokens=given.tokens, depth=0.0, residual=0.0)


class DepthRule(MuPRule):
    """Base of the rules with laws of depth."""

    __slots__ = ()

    exponents: laws.DepthExponents | None

    @property
    def powers(self) -> laws.DepthExponents:
        """Powers of the laws of batch, tokens and depth."""
        return self.exponents or laws.DepthExponents()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MuPConfig(WidthRule):
    """muP with AdamW: hidden rates fall as 1/width."""

    name: ClassVar[str] = "mup"

    exponents: laws.TokenExponents | None = None
    """Powers of the laws; None for those of the method."""
    base_head_dim: int = BASE_HEAD_DIM
    """Head width at which attention is scaled as usual."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MuPPlusPlusConfig(DepthRule):
    """muP++ with AdamW: muP with 1/sqrt(depth) in the rates and in the residual branches."""

    name: ClassVar[str] = "mup_plus_plus"
    outer_decay: ClassVar[float] = 0.0

    exponents: laws.DepthExponents | None = None
    """Powers of the laws; None for those of the method."""
    base_head_dim: int = BASE_HEAD_DIM
    """Head width at which attention is scaled as usual."""
    has_independent_decay: bool = False
    """Weight decay follows the schedule alone, and not the learning rate."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MuPMuonConfig(WidthRule):
    """muP for Muon, without a law of depth."""

    name: ClassVar[str] = "mup_muon"
    is_muon: ClassVar[bool] = True

    exponents: laws.TokenExponents | None = None
    """Powers of the laws; None for those of the method."""
    base_head_dim: int = BASE_HEAD_DIM
    """Head width at which attention is scaled as usual."""
    has_independent_decay: bool = False
    """Weight decay of Muon's matrices follows the schedule alone, and not the learning rate."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MuPPlusPlusMuonConfig(DepthRule):
    """muP++ for Muon, the baseline of the HyperP paper."""

    name: ClassVar[str] = "mup_plus_plus_muon"
    is_muon: ClassVar[bool] = True
    outer_decay: ClassVar[float] = 0.0

    exponents: laws.DepthExponents | None = None
    """Powers of the laws; None for those of the method."""
    base_head_dim: int = BASE_HEAD_DIM
    """Head width at which attention is scaled as usual."""
    has_independent_decay: bool = True
    """Weight decay of Muon's matrices follows the schedule alone, and not the learning rate."""


def mup(
    model: ModelConfig, budget: Budget, base: BasePoint, options: MuPRule | None = None
) -> Parameterization:
    """Return muP or one of its variants for a model.

    Args:
        model: Model to train.
        budget: Tokens of the run and of a step.
        base: Point at which the learning rate was tuned: its width, and what the laws need.
        options: Config of the variant; None is `MuPConfig()`.

    Raises:
        ValueError: A number of the base point is missing, or the model has other multipliers.
    """
    options = options or MuPConfig()
    rule = options.name
    powers = options.powers
    rate = laws.batch_factor(budget, base, powers.batch, rule)
    rate *= laws.depth_factor(model.num_layers, base, powers.depth, rule)
    rate *= laws.token_factor(budget, base, powers.tokens, rule)
    wider = model.embed_dim / base.number("embed_dim", rule)
    multipliers = ForwardMultipliers(
        residual=laws.residual_multiplier(model.num_layers, powers.residual),
        logits=1.0 / wider,
        router=1.0 if options.is_muon else 1.0 / wider,
        attention_scale=attention_scale(model, options.base_head_dim),
    )
    return Parameterization(
        model=with_multipliers(model, multipliers, rule), roles=_roles(model, options, rate, wider)
    )


def _roles(model: ModelConfig, options: MuPRule, rate: float, wider: float) -> RoleTable:
    outer: dict[str, Any] = {
        "learning_rate_multiplier": rate,
        "weight_decay_multiplier": options.outer_decay,
    }
    inner: dict[str, Any] = {"has_independent_decay": options.has_independent_decay}
    if options.is_muon:
        inner |= {"learning_rate_multiplier": rate, "weight_decay_multiplier": 1.0 / wider}
        hidden = router = dataclasses.replace(KAIMING, group="muon", **inner)
        zeros = Hyperparameters(
            learning_rate_multiplier=rate * zero_start_rate(model), weight_decay_multiplier=0.0
        )
    else:
        inner |= {"learning_rate_multiplier": rate / wider}
        hidden, router = (
            dataclasses.replace(row, **inner) for row in (KAIMING, fixed_normal(HEAD_STD))
        )
        zeros = Hyperparameters(**inner)
    return table_of(
        embedding=dataclasses.replace(fixed_normal(embedding_std(model)), **outer),
        head=dataclasses.replace(fixed_normal(HEAD_STD), **outer),
        hidden=hidden,
        router=router,
        vectors=Hyperparameters(**outer),
        zeros=zeros,
    )
