# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Online K-means: experts are chosen by cosine with the running mean of their tokens.

    cos_ti = x_t . m_i / (|x_t| |m_i|)              m_i: centroid of expert i, state, no gradient
    choice   the K largest of (1 + cos_ti) / 2 + b_i
    score    softmax_E(cos_t / temperature)          what gates and balance losses see
    m_i      <- decay m_i + (1 - decay) (sum of x_t sent to i) / counts_i     where counts_i > 0

The centroids are updated once per optimiser step from the whole global batch, with counts before
drops. No parameter is trained. The score to which a bias is added is in [0, 1], as biases expect.
Neither choice nor gates depend on the norm of x.

Source: arXiv 2605.12476, by secondary accounts. Readings chosen: decay 0.99, as in a
re-implementation; random unit vectors as the initial centroids, since zeros leave experts without
tokens; gates from the softmax of the cosine over a temperature, through which x, and nothing else,
gets a gradient. Without a bias the load stays uneven: the default is the paper's, loss-free.

`jaxmoe.contrib.telemetry.geometry` measures how similar trained routers are to this one.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.declarations import Declaration
from jaxmoe.routing.base import (
    Arrays,
    Key,
    RouterBase,
    RouterInputs,
    RouterOutput,
    RouterStatistics,
    Traits,
    sum_statistics,
)
from jaxmoe.routing.biases.base import SelectionBias
from jaxmoe.routing.biases.loss_free import LossFreeConfig
from jaxmoe.routing.routers.linear import SizedRouter
from jaxmoe.routing.routers.token_choice.token_choice import (
    choose,
    preferred_experts,
    score_logits,
    traits_of,
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class KMeansConfig(RouterBase):
    """The K experts whose centroids of past tokens are nearest in direction."""

    name: ClassVar[str] = "kmeans"

    decay: float = 0.99
    """Share of the old centroid kept at each step."""
    temperature: float = 0.1
    """Temperature of the softmax of the cosines, which gives the gates."""
    bias: SelectionBias | None = LossFreeConfig()
    """Added to (1 + cosine) / 2 for the choice alone."""

    def __post_init__(self):
        if not 0.0 <= self.decay < 1.0:
            raise ValueError(
                f"router.decay={self.decay} must be at least 0 (no memory) and below 1 (no change)"
            )
        if not 0.0 < self.temperature < float("inf"):
            raise ValueError(f"router.temperature={self.temperature} must be above 0, and finite")

    @property
    def traits(self) -> Traits:
        """Causal, unless the bias looks at the batch."""
        return traits_of(self.bias)


@dataclasses.dataclass(frozen=True)
class KMeans(SizedRouter):
    """The router, with the centroids and the selection bias as state."""

    def declarations(self) -> dict[str, Declaration]:
        """Return no parameters."""
        return {}

    def init(self, key: Array) -> tuple[Arrays, Any]:
        """Return no parameters, and the state: unit vectors `centroids [E D]`, and the bias's."""
        drawn = jax.random.normal(key, (self.num_experts, self.embed_dim), jnp.float32)
        state: dict[str, Any] = {"centroids": _unit(drawn)}
        if self.config.bias is not None:
            state["selection"] = self.config.bias.init(self.num_experts)
        return {}, state

    def route(
        self, params: Arrays, state: Any, inputs: RouterInputs, *, train: bool, key: Key
    ) -> RouterOutput:
        """Choose the K nearest experts of each token."""
        del params, key
        x = inputs.x.astype(jnp.float32)
        config = self.config
        centroids = jax.lax.stop_gradient(state["centroids"])
        cosines = jnp.einsum(
            "td,ed->te", _unit(x), _unit(centroids), preferred_element_type=jnp.float32
        )
        preference = cosines
        extra = {}
        if config.bias is not None:
            preference, extra = config.bias.prefer(
                state["selection"], 0.5 + 0.5 * cosines, inputs, top_k=self.top_k, train=train
            )
        logits = cosines / config.temperature
        scored = score_logits(logits, "softmax", is_log_first=True)
        preferred = preferred_experts(preference, top_k=self.top_k)
        selection, more = choose(scored, preferred, inputs)
        extra = extra | more
        statistics = sum_statistics(logits, scored.probs, selection.expert_ids, inputs.token_mask)
        if train:
            extra = extra | {"kmeans_x_sum": self.sum_by_expert(x, selection.expert_ids, inputs)}
        statistics = dataclasses.replace(statistics, extra=extra)
        return RouterOutput(
            selection=selection, logits=logits, probs=scored.probs, statistics=statistics
        )

    def sum_by_expert(
        self, x: Float[Array, "T D"], expert_ids: Array, inputs: RouterInputs
    ) -> Float[Array, "E D"]:
        """Return the sum of the tokens assigned to each expert."""
        experts = jnp.arange(self.num_experts, dtype=expert_ids.dtype)
        ids_TK = expert_ids.reshape(x.shape[0], self.top_k)
        chosen = (ids_TK[:, :, None] == experts[None, None, :]).sum(1).astype(jnp.float32)  # T, E
        # Padding may hold any value, and 0 * inf is NaN.
        x = jnp.where(inputs.token_mask[:, None], jax.lax.stop_gradient(x), 0.0)
        return jnp.einsum("te,td->ed", chosen, x, preferred_element_type=jnp.float32)

    def update(self, state: Any, statistics: RouterStatistics, step: Array) -> Any:
        """Return the state with the centroids moved to the mean of their tokens, and the new bias.

        Statistics of evaluation have no sums of tokens and do not move the centroids.
        """
        new = dict(state)
        if "kmeans_x_sum" in statistics.extra:
            counts = statistics.counts[:, None]
            mean = statistics.extra["kmeans_x_sum"] / jnp.maximum(counts, 1.0)
            decay = self.config.decay
            moved = decay * state["centroids"] + (1.0 - decay) * mean
            new["centroids"] = jnp.where(counts > 0.0, moved, state["centroids"])
        if self.config.bias is not None:
            new["selection"] = self.config.bias.update(
                state["selection"], statistics, step, top_k=self.top_k
            )
        return new


KMeansConfig.router = KMeans


def _unit(rows: Float[Array, "n D"]) -> Float[Array, "n D"]:
    """Return the rows scaled to length 1; rows shorter than 1e-6 are kept, for a finite slope."""
    squares = jnp.sum(rows**2, axis=-1, keepdims=True)
    return rows * jax.lax.rsqrt(jnp.where(squares > 1e-12, squares, 1.0))
