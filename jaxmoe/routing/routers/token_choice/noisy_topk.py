# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Noisy top-k: in training each logit gets Gaussian noise of learned width.

    z = x W,   sigma = softplus(x W_noise),   h = z + sigma * N(0, 1)        (evaluation: h = z)
    score_ti = softmax_E(h_t)_i,   the K experts of largest h

The paper's gate, the softmax of h over the chosen, is the gate `renormalized`. Noise alone does not
even the load: the paper's two losses are in `balancers/load_variation.py`. Loads have no gradient,
so the router returns the differentiable statistic `smooth_load`, the probability that an expert is
chosen when its own noise is drawn again:

    smooth_load_i = sum_t Phi((z_ti - kth largest of h_t without expert i) / sigma_ti)

In evaluation it is the load. With K = E every expert is always chosen. Logits, z-loss and
probabilities are those of z, without noise. W_noise starts at 0 as in the paper, W at random.

Source: arXiv 1701.06538, section 2.1 and appendix A.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.declarations import Declaration
from jaxmoe.routing.base import Arrays, Key, RouterInputs, Traits, chosen_experts
from jaxmoe.routing.routers.linear import linear_declarations, linear_logits
from jaxmoe.routing.routers.noise import token_noise
from jaxmoe.routing.routers.token_choice.token_choice import Scored, TokenChoiceBase
from sharding import axes as ax


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NoisyTopKConfig(TokenChoiceBase):
    """The K experts of highest logit after learned noise."""

    name: ClassVar[str] = "noisy_topk"

    @property
    def traits(self) -> Traits:
        """Causal; draws random numbers; returns smooth loads."""
        return Traits(can_replay=True, needs_key=True, has_smooth_load=True)

    def declarations(self, *, num_experts: int, embed_dim: int) -> dict[str, Declaration]:
        """Return the matrices of the logits, `weight`, and of the width of the noise, `noise`."""
        noise = Declaration(
            shape=(embed_dim, num_experts),
            axes=(ax.EMBED, ax.ROUTER_OUT),
            role="router_noise",
            init="zeros",
        )
        return linear_declarations(num_experts=num_experts, embed_dim=embed_dim) | {"noise": noise}

    def score(
        self, params: Arrays, inputs: RouterInputs, *, top_k: int, train: bool, key: Key
    ) -> Scored:
        """Return the softmax of the noisy logits, and the smooth loads."""
        logits = noisy = linear_logits(params, inputs)
        if train:
            sigma = jax.nn.softplus(linear_logits({"weight": params["noise"]}, inputs))
            noisy = logits + sigma * token_noise(key, inputs, logits.shape[1], "normal")
            chances = stay_probability(logits, noisy, sigma, top_k)
        else:
            chances = _is_chosen(noisy, top_k).astype(jnp.float32)
        smooth_load = jnp.sum(chances, axis=0, where=inputs.token_mask[:, None])
        return Scored(
            logits=logits,
            log_scores=jax.nn.log_softmax(noisy, axis=-1),
            probs=jax.nn.softmax(logits, axis=-1),
            preference=noisy,
            extra={"smooth_load": smooth_load},
        )


def stay_probability(
    logits: Float[Array, "T E"], noisy: Float[Array, "T E"], sigma: Float[Array, "T E"], top_k: int
) -> Float[Array, "T E"]:
    """Compute the probability that each expert is chosen when its own noise is drawn again.

    Args:
        logits: Logits without noise.
        noisy: Logits with the current draw.
        sigma: Standard deviation of the noise; where it is 0 the probability is 0 or 1.
        top_k: K.
    """
    if top_k == logits.shape[1]:
        return jnp.ones_like(logits)
    best = jax.lax.top_k(noisy, top_k + 1)[0]
    # Without a chosen expert the (K+1)-th largest becomes the K-th.
    threshold = jnp.where(_is_chosen(noisy, top_k), best[:, top_k:], best[:, top_k - 1 : top_k])
    # A floor keeps the slope finite where softplus underflows.
    return jax.scipy.stats.norm.cdf((logits - threshold) / jnp.maximum(sigma, 1e-6))


def _is_chosen(noisy: Float[Array, "T E"], top_k: int) -> Array:
    """Return whether each expert is among the K largest of its token; ties to the lower id."""
    _, ids = jax.lax.top_k(jax.lax.stop_gradient(noisy), top_k)
    return chosen_experts(ids, noisy.shape[1])
