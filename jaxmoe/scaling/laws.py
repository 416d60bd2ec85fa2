# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Scaling laws that transfer a learning rate from a base point to another run.

    eta = eta0 * (B / B0)^b * (L0 / L)^d * (T / T0)^-t        B tokens a step, L layers, T tokens
    residual multiplier = (2 L)^-r                            from the depth alone, without a base

An exponent of 0 turns a law off and makes its number of the base point optional. There is no law of
width: each parameterisation's table has its own dependence on width.

Provenance of the defaults (arXiv 2603.28743, its published tables; ArchScale at c2ec1d6):

    tokens t = 0.32   MuonH, depth 8, 10.4e9 to 166.4e9 tokens, five points: eta* = 24.27 T^-0.320
                      by least squares in eta, error left one out 1.5 %. The same points by least
                      squares in log eta give 0.3155. Another group's fits of MuonH mixtures, where
                      width and depth grew together, give 0.395 and 0.346; AdamW 0.32 (arXiv
                      2409.19913). Table 1 of the paper has the factor for hidden matrices only, the
                      code for all groups: `token_scaling`.
    batch  b = 0.5    the code's rule. The paper measures eta* = 4.66e-6 B^0.558 from 2^18 to 2^21
                      tokens, then keeps B at 2^21; the rule is 10 % above the measured optimum at
                      2^18. Not measured below.
    depth  d = 0.5    derived (theorem 3: normalised updates and residual branches times L^-r need
                      L^(r-1)), and swept from depth 8 to 24: the best eta lies between 0.014 and
                      0.016 with it, and falls from 0.016 to 0.008 without. A worst-case bound, and
                      one seed. Not measured below depth 8.

No sweep of the paper varies width alone: it is 128 L throughout. Below the base point in any number
every law is an extrapolation; `jaxmoe transfer` measures it.

To add a law: a factor that is 1 at the base point, and its exponent as a field of the records of
the parameterisations that follow it, both in `jaxmoe/scaling/laws.py`.
"""

from __future__ import annotations

import dataclasses

from jaxmoe.scaling.parameterization import BasePoint, Budget

TOKEN_EXPONENT = 0.32
BATCH_EXPONENT = 0.5
DEPTH_EXPONENT = 0.5
RESIDUAL_EXPONENT = 0.5


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BatchExponents:
    """Powers of the law of the batch."""

    batch: float = BATCH_EXPONENT
    """The rate grows as (batch / base batch) to this power; 0 turns the law off."""

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not -2.0 <= value <= 2.0:
                raise ValueError(
                    f"parameterization.exponents.{field.name}={value} must lie between -2 and 2; 0"
                    " turns it off"
                )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TokenExponents(BatchExponents):
    """Powers of the laws of batch and tokens."""

    tokens: float = 0.0
    """The rate falls as (tokens / base tokens) to this power; 0 turns the law off."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DepthExponents(TokenExponents):
    """Powers of the laws of batch, tokens and depth."""

    depth: float = DEPTH_EXPONENT
    """The rate falls as (depth / base depth) to this power; 0 turns the law off."""
    residual: float = RESIDUAL_EXPONENT
    """Residual branches are multiplied by (2 depth) to minus this power; 0 multiplies by 1."""


def token_factor(budget: Budget, base: BasePoint, exponent: float, rule: str) -> float:
    """Return (T / T0)^-exponent, for the tokens of the run.

    Args:
        budget: Tokens of the run.
        base: Point at which the rate was tuned.
        exponent: Exponent of the law; 0 turns it off.
        rule: Name of the parameterisation, for the error.

    Raises:
        ValueError: `base.tokens` is missing.
    """
    if exponent == 0.0:
        return 1.0
    return (budget.tokens / base.number("tokens", rule)) ** -exponent


def batch_factor(budget: Budget, base: BasePoint, exponent: float, rule: str) -> float:
    """Return (B / B0)^exponent, for the tokens of one step; see `token_factor`.

    Raises:
        ValueError: `base.batch_tokens` is missing.
    """
    if exponent == 0.0:
        return 1.0
    return (budget.batch_tokens / base.number("batch_tokens", rule)) ** exponent


def depth_factor(num_layers: int, base: BasePoint, exponent: float, rule: str) -> float:
    """Return (L0 / L)^exponent, for the depth; see `token_factor`.

    Raises:
        ValueError: `base.num_layers` is missing.
    """
    if exponent == 0.0:
        return 1.0
    return (base.number("num_layers", rule) / num_layers) ** exponent


def residual_multiplier(num_layers: int, exponent: float) -> float:
    """Return (2 L)^-exponent, which bounds the growth of the residual stream with depth."""
    return (2 * num_layers) ** -exponent
