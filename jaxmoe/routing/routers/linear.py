# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Parts that routers share: sizes, the matrix x W, token-major output."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmoe.declarations import Declaration, draw
from jaxmoe.routing.base import (
    Arrays,
    Key,
    RouterInputs,
    RouterOutput,
    RouterStatistics,
    sum_statistics,
    token_major,
)
from jaxmoe.routing.routers.noise import token_noise
from sharding import axes as ax


@dataclasses.dataclass(frozen=True)
class SizedRouter:
    """Base class of routers of given sizes, with one matrix from D to E and without state.

    A subclass defines `route`, `declarations` where its parameters are others, and `init` and
    `update` where it has a state, such as a bias.
    """

    config: Any
    num_experts: int
    top_k: int
    embed_dim: int

    def __post_init__(self):
        check_sizes(num_experts=self.num_experts, top_k=self.top_k)

    def declarations(self) -> dict[str, Declaration]:
        """Return the matrix `weight [D E]`."""
        return linear_declarations(num_experts=self.num_experts, embed_dim=self.embed_dim)

    def init(self, key: Array) -> tuple[Arrays, Any]:
        """Return random parameters and an empty state."""
        return draw(self.declarations(), key), {}

    def update(self, state: Any, statistics: RouterStatistics, step: Array) -> Any:
        """Return the state unchanged."""
        del statistics, step
        return state


def check_sizes(*, num_experts: int, top_k: int) -> None:
    """Check that K experts can be chosen out of E.

    Raises:
        ValueError: `top_k` is below 1 or above `num_experts`.
    """
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k={top_k} must lie between 1 and num_experts={num_experts}")


def check_jitter(jitter: float) -> None:
    """Check that the jitter is in [0, 1).

    Raises:
        ValueError: it is not.
    """
    if not 0.0 <= jitter < 1.0:
        raise ValueError(f"router.jitter={jitter} must be at least 0 (off) and below 1")


def linear_declarations(
    *, num_experts: int, embed_dim: int, has_bias: bool = False
) -> dict[str, Declaration]:
    """Return the declarations of a linear layer from D to E.

    Args:
        num_experts: E.
        embed_dim: D.
        has_bias: Whether the layer has a vector `bias [E]` beside its matrix `weight [D E]`.
    """
    weight = Declaration(
        shape=(embed_dim, num_experts), axes=(ax.EMBED, ax.ROUTER_OUT), role="router"
    )
    if not has_bias:
        return {"weight": weight}
    bias = Declaration(
        shape=(num_experts,),
        axes=(ax.ROUTER_OUT,),
        role="connection_bias",
        matrix=None,
        init="zeros",
    )
    return {"weight": weight, "bias": bias}


def linear_logits(
    params: Arrays,
    inputs: RouterInputs,
    *,
    jitter: float = 0.0,
    train: bool = False,
    key: Key = None,
) -> Float[Array, "T E"]:
    """Compute z = x W, plus b where there is one, in f32.

    Args:
        params: Parameters with the matrix `weight [D E]`, and `bias [E]` if the layer has one.
        inputs: Tokens; `x` is cast to f32.
        jitter: In training x is first multiplied by uniform numbers in [1 - jitter, 1 + jitter)
            (Switch Transformers, arXiv 2101.03961, section 2.4).
        train: Whether to apply the jitter.
        key: Key of this layer and step; needed where the jitter applies.
    """
    x = inputs.x.astype(jnp.float32)
    weight = params["weight"].astype(jnp.float32)
    if train and jitter > 0.0:
        noise = token_noise(key, inputs, x.shape[1], "uniform")
        x = x * (1.0 - jitter + 2.0 * jitter * noise)
    logits = jnp.einsum("td,de->te", x, weight, preferred_element_type=jnp.float32)
    if "bias" not in params:
        return logits
    return logits + params["bias"].astype(jnp.float32)[None, :]


def token_output(
    expert_ids: Int[Array, "T K"],
    log_scores: Float[Array, "T K"],
    inputs: RouterInputs,
    *,
    logits: Float[Array, "T E"],
    probs: Float[Array, "T E"],
) -> RouterOutput:
    """Return the output of a router whose experts are already chosen.

    Args:
        expert_ids: Chosen experts; E marks an empty slot.
        log_scores: Logarithms of the scores of these pairs; -inf marks an empty slot.
        inputs: Tokens; the slots of padding are emptied here.
        logits: Raw logits, f32.
        probs: Probabilities, f32; each row sums to 1.
    """
    selection = token_major(expert_ids, log_scores, inputs.token_mask, logits.shape[1])
    statistics = sum_statistics(logits, probs, selection.expert_ids, inputs.token_mask)
    return RouterOutput(selection=selection, logits=logits, probs=probs, statistics=statistics)
