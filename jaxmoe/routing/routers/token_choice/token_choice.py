# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Token choice: each token takes the K experts that it prefers.

    logits -> scores -> preference (bias, groups) -> K best -> scores of the chosen, unbiased

A family is a config that scores (`Scorer`); everything after the scores is here, once: selection
bias, group limit, ties to the lower expert, padding, statistics. Files of the family:
`softmax_topk`, `sigmoid_topk` and their neighbours.

To add a member: a config with the fields and methods of `Scorer`, whose `build` returns
`TokenChoice(self, ...)`, then as in `jaxmoe/routing/__init__.py`.
"""

from __future__ import annotations

import dataclasses
import typing
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from jaxmoe.parameters import Declaration, draw
from jaxmoe.routing.base import (
    RouterInputs,
    RouterOutput,
    RouterStatistics,
    Selection,
    Traits,
    sum_statistics,
    token_major,
)
from jaxmoe.routing.biases import BiasConfig
from jaxmoe.routing.routers.noise import token_noise
from jaxmoe.routing.routers.token_choice.groups import GroupLimitConfig, limit_groups
from sharding import axes as ax


@typing.no_type_check
@struct.dataclass
class Scored:
    """What a scorer says of each pair of token and expert."""

    logits: Float[Array, "T E"]
    """Raw and unbiased, f32: what z-loss and telemetry see."""
    log_scores: Float[Array, "T E"]
    """Logarithm of the score, f32."""
    probs: Float[Array, "T E"]
    """Sums to 1 over E, f32."""
    preference: Float[Array, "T E"]
    """What experts are chosen by where there is no bias; any increasing function of the score."""
    extra: dict[str, Array] = struct.field(default_factory=dict)
    """Additive statistics of the scorer."""
    is_over_chosen: bool = struct.field(pytree_node=False, default=False)
    """The scores of the chosen become their softmax over the chosen."""


class Scorer(Protocol):
    """A config of the family."""

    @property
    def bias(self) -> BiasConfig | None:
        """Selection bias."""
        ...

    @property
    def groups(self) -> GroupLimitConfig | None:
        """Group limit."""
        ...

    @property
    def traits(self) -> Traits:
        """See `Traits`."""
        ...

    def declarations(self, *, num_experts: int, embed_dim: int) -> dict[str, Declaration]:
        """Parameters by name."""
        ...

    def score(
        self,
        params: dict[str, Array],
        inputs: RouterInputs,
        *,
        top_k: int,
        train: bool,
        key: Array | None,
    ) -> Scored:
        """Scores of all pairs."""
        ...


def check_sizes(*, num_experts: int, top_k: int) -> None:
    """Refuses a K that no token can have.

    Raises:
        ValueError: naming both.
    """
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k={top_k} must lie between 1 and num_experts={num_experts}")


@dataclasses.dataclass(frozen=True)
class TokenChoice:
    """A scorer with its sizes: the router."""

    config: Any
    num_experts: int
    top_k: int
    embed_dim: int

    def __post_init__(self):
        check_sizes(num_experts=self.num_experts, top_k=self.top_k)
        if self.config.groups is not None:
            self.config.groups.check(num_experts=self.num_experts, top_k=self.top_k)

    def declarations(self) -> dict[str, Declaration]:
        """Those of the scorer."""
        return self.config.declarations(num_experts=self.num_experts, embed_dim=self.embed_dim)

    def init(self, key: Array) -> tuple[dict[str, Array], Any]:
        """Random parameters; the state of the bias, or none."""
        bias = self.config.bias
        return draw(self.declarations(), key), {} if bias is None else bias.init(self.num_experts)

    def route(
        self,
        params: dict[str, Array],
        state: Any,
        inputs: RouterInputs,
        *,
        train: bool,
        key: Array | None,
    ) -> RouterOutput:
        """The K preferred experts of each token."""
        config = self.config
        scored = config.score(params, inputs, top_k=self.top_k, train=train, key=key)
        preference, extra = scored.preference, scored.extra
        if config.bias is not None:
            scores = jnp.exp(scored.log_scores)
            preference, more = config.bias.prefer(
                state, scores, inputs, top_k=self.top_k, train=train
            )
            extra = extra | more
        if config.groups is not None:
            preference = limit_groups(preference, config.groups, top_k=self.top_k)
        selection = choose(scored, preference, inputs, top_k=self.top_k)
        statistics = sum_statistics(
            scored.logits, scored.probs, selection.expert_ids, inputs.token_mask
        )
        statistics = dataclasses.replace(statistics, extra=extra)
        return RouterOutput(
            selection=selection,
            logits=scored.logits,
            probs=scored.probs,
            statistics=statistics,
            carry=scored.logits if config.traits.carries_logits else None,
        )

    def update(self, state: Any, statistics: RouterStatistics, step: Array) -> Any:
        """The bias moves; nothing else is kept."""
        if self.config.bias is None:
            return state
        return self.config.bias.update(state, statistics, step, top_k=self.top_k)


def choose(
    scored: Scored, preference: Float[Array, "T E"], inputs: RouterInputs, *, top_k: int
) -> Selection:
    """The K experts of largest preference, with their unbiased scores; ties to the lower id."""
    _, expert_ids = jax.lax.top_k(jax.lax.stop_gradient(preference), top_k)
    source = scored.logits if scored.is_over_chosen else scored.log_scores
    chosen = jnp.take_along_axis(source, expert_ids, axis=-1)
    if scored.is_over_chosen:
        chosen = jax.nn.log_softmax(chosen, axis=-1)
    return token_major(expert_ids, chosen, inputs.token_mask, preference.shape[1])


def token_output(
    expert_ids: Int[Array, "T K"],
    log_scores: Float[Array, "T K"],
    inputs: RouterInputs,
    *,
    logits: Float[Array, "T E"],
    probs: Float[Array, "T E"],
) -> RouterOutput:
    """What a router returns that chose for itself.

    Args:
        expert_ids: E where a token does without.
        log_scores: of these pairs, -inf where a token does without.
        inputs: for the mask.
        logits: raw, f32.
        probs: sums to 1 over E, f32.
    """
    selection = token_major(expert_ids, log_scores, inputs.token_mask, logits.shape[1])
    statistics = sum_statistics(logits, probs, selection.expert_ids, inputs.token_mask)
    return RouterOutput(selection=selection, logits=logits, probs=probs, statistics=statistics)


def linear_declarations(*, num_experts: int, embed_dim: int) -> dict[str, Declaration]:
    """One matrix from D to E, without bias."""
    weight = Declaration(
        shape=(embed_dim, num_experts), axes=(ax.EMBED, ax.ROUTER_OUT), role="router"
    )
    return {"weight": weight}


def linear_logits(
    params: dict[str, Array],
    inputs: RouterInputs,
    *,
    jitter: float = 0.0,
    train: bool = False,
    key: Array | None = None,
) -> Float[Array, "T E"]:
    """z = x W, f32; in training x is first multiplied by uniform numbers, 1 - jitter to 1 + jitter.

    Source of the jitter: Switch Transformers (arXiv 2101.03961, section 2.4).
    """
    x, weight = inputs.x.astype(jnp.float32), params["weight"].astype(jnp.float32)
    if train and jitter > 0.0:
        noise = token_noise(key, inputs, x.shape[1], "uniform")
        x = x * (1.0 - jitter + 2.0 * jitter * noise)
    return jnp.einsum("td,de->te", x, weight, preferred_element_type=jnp.float32)


def check_jitter(jitter: float) -> None:
    """Refuses a jitter that is no share.

    Raises:
        ValueError: naming the field.
    """
    if not 0.0 <= jitter < 1.0:
        raise ValueError(f"router.jitter={jitter} must be at least 0 (off) and below 1")


def traits_of(bias: BiasConfig | None, jitter: float) -> Traits:
    """Traits of a member whose only peculiarities are a bias and jitter."""
    sees_others = bias is not None and bias.sees_others
    return Traits(sees_others=sees_others, needs_key=jitter > 0.0)
