# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""HyperP: one learning rate for every size, with each matrix on a sphere.

    eta = eta0 (B / B0)^0.5 (L0 / L)^0.5 (T / T0)^-0.32         no term of width, experts or top_k

                 initial values          group    learning rate            weight decay
    embedding    1e-4; 0.02 tied         adamw    1 (or without tokens)    0
    head         0.02, or bound / D      adamh    1 (or without tokens)    1
    hidden       uniform, 1/sqrt(3 fan)  muonh    1                        1
    experts      uniform, 1/sqrt(3 fan)  muonh    1                        1
    router       uniform, 1/sqrt(3 fan)  muonh    1                        1
    vectors      1                       adamw    1 (or without tokens)    0
    zeros        0                       adamw    1/sqrt(3 D)              0

    residual branches times 1/sqrt(2 L) at the model's own depth; logits and router logits unscaled
    attention logits times sqrt(H0) / H, with H0 = 128: as usual for heads of 128

Width needs no term because a step turns a matrix by the angle eta whatever its size, and a matrix
of fixed radius, sqrt(fan_out / 3), preserves the size of its input. eta0 tuned at depth 8, 2^21
tokens per step and 10.4e9 tokens: 0.014 for mixtures of experts, 0.0155 dense. Schedule: no
warm-up, linear to a tenth. Initialisation sets the radius; the sphere of an expert (each, or the
stack) is an option of the optimiser.

If paper and code differ, the code's choice is the default, because it produced the numbers: the
token factor on all groups (`token_scaling`), the batch exponent 0.5 while the paper measures 0.558
(`exponents.batch`). Provenance of the exponents: `jaxmoe.scaling.laws`. The scale of attention is
that of ArchScale's muP; the paper has heads of 128 only.

Choices of this library: matrices on a sphere follow optimizer.weight_decay, which is 0 as in the
paper; AdamW's embedding and gains have no decay; zero-started router matrices move as far as MuonH
would move them (`zero_start_rate`); tied embeddings are refused, because the embedding is off the
sphere and the head on it, unless `tied_embeddings=adamw`, which keeps one matrix of std 0.02 under
AdamW as ArchScale does. An embedding std of 1e-4 needs model.norm_epsilon 1e-5: see
`embedding_std`.

The head is the one matrix whose radius depends on width. Behind a norm of gain 1, no logit of a row
of mean length exceeds |row| |h| = (std sqrt(D)) sqrt(D) = std D: 20.5 at the paper's base width of
1024, but 1.3 at 64, which limits a model until AdamW has raised the gains, and a turn of the head
by eta moves logits in proportion to D. (One sphere holds all rows and bounds their root mean
square; single rows may grow.) The paper does not sweep width alone. `logit_bound` fixes std D
instead; 20.48 is the paper's value at its base width. Measurements: experiments/README.md.

Other parts of the method: SqrtGate and the balance loss (`METHODS["hyperp"]`), sizes
(`jaxmoe.models.sizing`), the optimiser (`jaxmoe.optim.MuonHConfig`).

Source: arXiv 2603.28743 and ArchScale at c2ec1d6.

To add an option: a field in `jaxmoe/scaling/hyperp.py`, a row in
`tests/jaxmoe/scaling/test_scaling.py`.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from jaxmoe import combinations
from jaxmoe.models.config import ForwardMultipliers, ModelConfig
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
    TiedEmbeddings,
    TokenScaling,
    attention_scale,
    check_head_width,
    sphere_table,
    with_multipliers,
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HyperPExponents(laws.BatchExponents):
    """Powers of HyperP's laws."""

    batch: float = laws.BATCH_EXPONENT
    """The rate grows as (batch / base batch) to this power; the paper measures 0.558."""
    tokens: float = laws.TOKEN_EXPONENT
    """The rate falls as (tokens / base tokens) to this power; 0 turns the law off."""
    depth: float = laws.DEPTH_EXPONENT
    """The rate falls as (depth / base depth) to this power; 1 - residual in theory."""
    residual: float = laws.RESIDUAL_EXPONENT
    """Residual branches are multiplied by (2 depth) to minus this power; 0 multiplies by 1."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HyperPConfig(ParameterizationBase):
    """HyperP (for MuonH): one learning rate for every width, depth, length of run and expert."""

    name: ClassVar[str] = "hyperp"

    exponents: HyperPExponents | None = None
    """Powers of the laws; None for those of the method."""
    token_scaling: TokenScaling = "all"
    """Rates that the tokens scale: all, as in the paper's code, or those of hidden matrices, as in
    its Table 1."""
    base_head_dim: int = BASE_HEAD_DIM
    """Head width at which attention is scaled as usual; set it to the model's to disable."""
    tied_embeddings: TiedEmbeddings = "refuse"
    """Treatment of a head tied to the embedding: an error, or AdamW without a sphere."""
    logit_bound: float | None = None
    """Largest logit of a head row of mean length behind a norm of gain 1, the same at every width;
    None is the paper's fixed std, with a bound that grows with width (20.48 at 1024)."""

    def __post_init__(self):
        check_head_width(self.base_head_dim)
        if self.logit_bound is not None and not self.logit_bound > 0:
            raise ValueError(
                f"parameterization.logit_bound={self.logit_bound} must be above 0, or None for the"
                f" paper's std of {HEAD_STD} at every width"
            )

    def build(self, model: ModelConfig, budget: Budget, base: BasePoint) -> Parameterization:
        """Return the parameterisation of a model; see `hyperp`."""
        return hyperp(model, budget, base, self)


def hyperp(
    model: ModelConfig, budget: Budget, base: BasePoint, options: HyperPConfig | None = None
) -> Parameterization:
    """Return HyperP.

    Args:
        model: Model to train.
        budget: Tokens of the run and of a step.
        base: Point at which the learning rate was tuned: its depth, tokens and batch.
        options: Exponents and disputed readings; None is `HyperPConfig()`.

    Raises:
        ValueError: A number of the base point is missing, the embeddings are tied, or the model has
            other multipliers.
    """
    options = options or HyperPConfig()
    rule = "hyperp"
    combinations.check(model=model, parameterization=options)
    powers = options.exponents or HyperPExponents()
    outer = laws.batch_factor(budget, base, powers.batch, rule)
    outer *= laws.depth_factor(model.num_layers, base, powers.depth, rule)
    tokens = laws.token_factor(budget, base, powers.tokens, rule)
    inner = outer * tokens
    if options.token_scaling == "all":
        outer = inner
    multipliers = ForwardMultipliers(
        residual=laws.residual_multiplier(model.num_layers, powers.residual),
        attention_scale=attention_scale(model, options.base_head_dim),
    )

    return Parameterization(
        model=with_multipliers(model, multipliers, rule),
        roles=sphere_table(
            model,
            start=KAIMING,
            head_std=_head_std(model, options.logit_bound),
            inner=inner,
            outer=outer,
        ),
    )


def _head_std(model: ModelConfig, logit_bound: float | None) -> float:
    return HEAD_STD if logit_bound is None else logit_bound / model.embed_dim
