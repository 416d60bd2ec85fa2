# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Online K-means: a router without trained parameters; each expert stands where its tokens are.

    cos_ti = x_t . m_i / (|x_t| |m_i|)              m_i: centroid of expert i, state, no gradient
    choice   the K largest of (1 + cos_ti) / 2 + b_i
    score    softmax_E(cos_t / temperature)          what gates and balance losses see
    m_i      <- decay m_i + (1 - decay) (sum of x_t sent to i) / counts_i     where counts_i > 0

once per optimiser step over the whole global batch, loads before drops. The score that a bias is
added to lies in [0, 1], as biases expect. The choice does not depend on the size of x, and neither
do the gates; the centroids have that of the hidden states.

Source: arXiv 2605.12476, by secondary accounts. Readings taken: decay 0.99 as in a
re-implementation; random unit vectors to start from, where zeros leave experts dead; gates from the
softmax of the cosine with a temperature, through which x, and nothing else, gets a gradient.
Without a bias the load stays uneven: the paper's is loss-free, the default here.

`jaxmoe.routing.telemetry.geometry` measures how far trained routers do the same.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.parameters import Declaration
from jaxmoe.routing.base import (
    RouterInputs,
    RouterOutput,
    RouterStatistics,
    Traits,
    sum_statistics,
)
from jaxmoe.routing.biases import BiasConfig, LossFreeConfig
from jaxmoe.routing.routers.token_choice.token_choice import Scored, check_sizes, choose, traits_of


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class KMeansConfig:
    """The K experts whose centroids of past tokens are nearest in direction."""

    name: ClassVar[str] = "kmeans"

    decay: float = 0.99
    """What is left of a centroid after a step."""
    temperature: float = 0.1
    """Cosines are divided by it before the softmax of the gates."""
    bias: BiasConfig | None = LossFreeConfig()
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
        return traits_of(self.bias, 0.0)

    def build(self, *, num_experts: int, top_k: int, embed_dim: int) -> KMeans:
        """The router for these sizes."""
        return KMeans(self, num_experts, top_k, embed_dim)


@dataclasses.dataclass(frozen=True)
class KMeans:
    """K-means with its sizes: the router."""

    config: KMeansConfig
    num_experts: int
    top_k: int
    embed_dim: int

    def __post_init__(self):
        check_sizes(num_experts=self.num_experts, top_k=self.top_k)

    def declarations(self) -> dict[str, Declaration]:
        """Nothing is trained."""
        return {}

    def init(self, key: Array) -> tuple[dict[str, Array], Any]:
        """No parameters; random unit vectors `centroids [E D]`, and the state of the bias."""
        drawn = jax.random.normal(key, (self.num_experts, self.embed_dim), jnp.float32)
        state: dict[str, Any] = {"centroids": _unit(drawn)}
        if self.config.bias is not None:
            state["selection"] = self.config.bias.init(self.num_experts)
        return {}, state

    def route(
        self,
        params: dict[str, Array],
        state: Any,
        inputs: RouterInputs,
        *,
        train: bool,
        key: Array | None,
    ) -> RouterOutput:
        """The K nearest experts of each token."""
        del params, key
        x, config = inputs.x.astype(jnp.float32), self.config
        centroids = jax.lax.stop_gradient(state["centroids"])
        cosines = jnp.einsum(
            "td,ed->te", _unit(x), _unit(centroids), preferred_element_type=jnp.float32
        )
        preference, extra = cosines, {}
        if config.bias is not None:
            preference, extra = config.bias.prefer(
                state["selection"], 0.5 + 0.5 * cosines, inputs, top_k=self.top_k, train=train
            )
        logits = cosines / config.temperature
        scored = Scored(
            logits=logits,
            log_scores=jax.nn.log_softmax(logits, axis=-1),
            probs=jax.nn.softmax(logits, axis=-1),
            preference=cosines,
        )
        selection = choose(scored, preference, inputs, top_k=self.top_k)
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
        """Sum of the tokens that each expert was given."""
        experts = jnp.arange(self.num_experts, dtype=expert_ids.dtype)
        ids_TK = expert_ids.reshape(x.shape[0], self.top_k)
        chosen = (ids_TK[:, :, None] == experts[None, None, :]).sum(1).astype(jnp.float32)  # T, E
        # What stands in padding may be anything, and 0 * inf is no 0.
        x = jnp.where(inputs.token_mask[:, None], jax.lax.stop_gradient(x), 0.0)
        return jnp.einsum("te,td->ed", chosen, x, preferred_element_type=jnp.float32)

    def update(self, state: Any, statistics: RouterStatistics, step: Array) -> Any:
        """Centroids move to the mean of their tokens; so does the bias by its rule.

        Statistics of evaluation hold no tokens, and leave the centroids where they are.
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


def _unit(rows: Float[Array, "n D"]) -> Float[Array, "n D"]:
    """Rows of length 1; one of length below 1e-6 stays as it is, so that its slope is finite."""
    squares = jnp.sum(rows**2, axis=-1, keepdims=True)
    return rows * jax.lax.rsqrt(jnp.where(squares > 1e-12, squares, 1.0))
