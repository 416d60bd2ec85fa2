# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Policy gradients from the rewards of sampled answers: GRPO, Dr. GRPO and RLOO.

    r     = exp(lp - old)                              lp = -nll of the token that was drawn
    loss  = weight * (-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) * w + beta * k3)
    k3    = exp(ref - lp) - (ref - lp) - 1

`Batch.extra` holds, at the positions of the answers, `old_log_probs` and `advantages` A; with beta
above 0 `reference_log_probs` ref; optionally `sampler_weights` w, the truncated importance weights
of tokens that another program has drawn. Prompts and padding have weight 0. Log ratios are cut at
+-20.

The loss has no branch for the variants. They differ in A, a function of the rewards of a group, and
in the weights of the tokens:

    sequence   mean over answers of the mean over their tokens (GRPO)
    token      mean over all tokens
    constant   sum over the tokens, divided by the answers and a constant length (Dr. GRPO)

The loss of a step is divided by its trained tokens N, so that weights are N times these factors.

Where all advantages of a step are zero, as with equal rewards, the step changes nothing: neither
the losses of balancers nor the divergence move parameters without a reward to compare.

A batch without `advantages`, such as a held-out one, has the loss of the next token.

Sources: GRPO (arXiv 2402.03300, section 4.1), Dr. GRPO (arXiv 2503.20783, section 3.2), RLOO (arXiv
2402.14740, section 2.2); k3: Schulman, "Approximating KL divergence". The mean over all tokens, and
a clip_high above clip_low, are parts of DAPO (arXiv 2503.14476, equations 8 and 12); its dynamic
sampling and its shaping of overlong answers are not here.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jaxmoe.contrib.rl.advantages import (
    LARGEST_LOG_RATIO,
    AdvantageName,
    AggregationName,
)
from jaxmoe.data.batch import Batch
from jaxmoe.training.next_token import CausalObjective
from jaxmoe.training.objective import TokenGiven

ADVANTAGES = "advantages"
OLD = "old_log_probs"
REFERENCE = "reference_log_probs"
SAMPLER_WEIGHTS = "sampler_weights"
"""Names in `Batch.extra`."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PolicyGradientConfig(CausalObjective):
    """Make answers with a high reward likelier (GRPO); needs rollouts, see experiments.rl."""

    name: ClassVar[str] = "policy_gradient"

    advantage: AdvantageName = "grpo"
    """Advantage of an answer over the others of its group: grpo, reward minus mean over standard
    deviation; dr_grpo, reward minus mean; rloo, reward minus the mean of the others."""
    aggregation: AggregationName = "sequence"
    """Mean over tokens: sequence, of the means of answers (GRPO); token, of all tokens;
    constant, of answers whose sums are divided by the longest answer allowed (Dr. GRPO)."""
    clip_low: float = 0.2
    """Ratios below 1 - clip_low give no gradient where the advantage is negative."""
    clip_high: float = 0.2
    """Ratios above 1 + clip_high give no gradient where the advantage is positive."""
    beta: float = 0.0
    """Factor of the divergence from the initial model; 0 needs no second model."""

    def __post_init__(self):
        if not 0.0 < self.clip_low <= 1.0:
            raise ValueError(f"objective.clip_low={self.clip_low} must be above 0 and at most 1")
        if self.clip_high <= 0.0:
            raise ValueError(f"objective.clip_high={self.clip_high} must be above 0")
        if self.beta < 0.0:
            raise ValueError(f"objective.beta={self.beta} must be 0 or more")

    def token_counts(self, batch: Batch) -> Float[Array, "B S"]:
        """Return 1 for tokens with a weight."""
        return (jnp.asarray(batch.loss_weights) > 0).astype(jnp.float32)

    def has_signal(self, batch: Batch) -> Bool[Array, ""] | None:
        """Return whether an advantage is not zero; None for a batch without advantages."""
        if ADVANTAGES not in batch.extra:
            return None
        return jnp.any(jnp.asarray(batch.extra[ADVANTAGES]) != 0.0)

    def is_cut(
        self, log_ratio: Float[np.ndarray, "B S"], advantages: Float[np.ndarray, "B S"]
    ) -> Bool[np.ndarray, "B S"]:
        """Return the tokens whose ratio the loss cuts, so that they give no gradient; on the host.

        Args:
            log_ratio: Log-probabilities less the old ones.
            advantages: Advantages of the same tokens.
        """
        ratio = np.exp(np.clip(log_ratio, -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO))
        is_above = (advantages > 0) & (ratio > 1.0 + self.clip_high)
        return is_above | (advantages < 0) & (ratio < 1.0 - self.clip_low)

    def token_loss(self, nll: Float[Array, "B S"], given: TokenGiven) -> Float[Array, "B S"]:
        """Return the loss of each token from its negative log-likelihood, for some positions."""
        if ADVANTAGES not in given.extra:
            return nll * given.weights
        advantages = given.extra[ADVANTAGES]
        ratio = jnp.exp(_bound(-nll - given.extra[OLD]))
        clipped = jnp.clip(ratio, 1.0 - self.clip_low, 1.0 + self.clip_high)
        losses = -jnp.minimum(ratio * advantages, clipped * advantages)
        if SAMPLER_WEIGHTS in given.extra:
            losses = losses * given.extra[SAMPLER_WEIGHTS]
        if REFERENCE in given.extra:
            log_ratio = _bound(given.extra[REFERENCE] + nll)
            losses = losses + self.beta * (jnp.exp(log_ratio) - log_ratio - 1.0)
        return losses * given.weights


def _bound(log_ratio: Float[Array, "B S"]) -> Float[Array, "B S"]:
    return jnp.clip(log_ratio, -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
