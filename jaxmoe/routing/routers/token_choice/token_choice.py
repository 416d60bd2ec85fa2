# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Token choice: each token takes the K experts it prefers.

    logits -> scores -> preference (bias, group limit) -> K best -> unbiased scores of the chosen

A member of the family is a config that computes `Scored`, the scores of all pairs. The router
`TokenChoice` does the rest: selection bias, group limit, ties to the lower expert, replay of
recorded experts (`jaxmoe/routing/replay.py`), padding, statistics.

To add a member: a config in `jaxmoe/routing/routers/token_choice/` that extends
`TokenChoiceBase` and defines `name` and `score`; then the steps in `jaxmoe/routing/README.md`.
"""

from __future__ import annotations

import abc
import dataclasses
import typing
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from jaxmoe.declarations import Declaration, draw
from jaxmoe.routing.base import (
    Arrays,
    Key,
    RouterBase,
    RouterInputs,
    RouterOutput,
    RouterStatistics,
    ScoreFunction,
    Selection,
    Traits,
    sum_statistics,
    token_major,
)
from jaxmoe.routing.biases.base import SelectionBias
from jaxmoe.routing.replay import replay_experts
from jaxmoe.routing.routers.linear import SizedRouter, linear_declarations
from jaxmoe.routing.routers.token_choice.groups import GroupLimitConfig, limit_groups


@typing.no_type_check
@struct.dataclass
class Scored:
    """Scores of all pairs of token and expert."""

    logits: Float[Array, "T E"]
    """Raw, unbiased logits, f32; read by the z-loss and telemetry."""
    log_scores: Float[Array, "T E"]
    """Logarithm of the score, f32."""
    probs: Float[Array, "T E"]
    """Probabilities; each row sums to 1, f32."""
    preference: Float[Array, "T E"]
    """Criterion of the choice where there is no bias; any increasing function of the score."""
    extra: Arrays = struct.field(default_factory=dict)
    """Further additive statistics."""
    is_over_chosen: bool = struct.field(pytree_node=False, default=False)
    """The scores of the chosen experts are replaced by their softmax over the chosen."""


class TokenChoiceBase(RouterBase):
    """Base class of the family's configs: one matrix from D to E, built into `TokenChoice`.

    A member defines `score`, and as fields those of `bias` and `groups` that it has.
    """

    __slots__ = ()

    bias: SelectionBias | None = None
    """Selection bias."""
    groups: GroupLimitConfig | None = None
    """Limit on the groups of experts that a token may use."""

    @property
    def traits(self) -> Traits:
        """Causal, unless the bias looks at the batch."""
        return traits_of(self.bias)

    def declarations(self, *, num_experts: int, embed_dim: int) -> dict[str, Declaration]:
        """Return the parameters by name: by default the matrix `weight [D E]`."""
        return linear_declarations(num_experts=num_experts, embed_dim=embed_dim)

    @abc.abstractmethod
    def score(
        self, params: Arrays, inputs: RouterInputs, *, top_k: int, train: bool, key: Key
    ) -> Scored:
        """Return the scores of all pairs of token and expert."""


@dataclasses.dataclass(frozen=True)
class TokenChoice(SizedRouter):
    """The router: a scorer with its sizes. Its state is that of the selection bias."""

    def __post_init__(self):
        SizedRouter.__post_init__(self)
        if self.config.groups is not None:
            self.config.groups.check(num_experts=self.num_experts, top_k=self.top_k)

    def declarations(self) -> dict[str, Declaration]:
        """Return the scorer's parameters by name."""
        return self.config.declarations(num_experts=self.num_experts, embed_dim=self.embed_dim)

    def init(self, key: Array) -> tuple[Arrays, Any]:
        """Return random parameters, and the state of the bias or an empty one."""
        bias = self.config.bias
        return draw(self.declarations(), key), {} if bias is None else bias.init(self.num_experts)

    def route(
        self, params: Arrays, state: Any, inputs: RouterInputs, *, train: bool, key: Key
    ) -> RouterOutput:
        """Choose the K preferred experts of each token."""
        config = self.config
        scored = config.score(params, inputs, top_k=self.top_k, train=train, key=key)
        preference = scored.preference
        extra = scored.extra
        if config.bias is not None:
            scores = jnp.exp(scored.log_scores)
            preference, more = config.bias.prefer(
                state, scores, inputs, top_k=self.top_k, train=train
            )
            extra = extra | more
        if config.groups is not None:
            preference = limit_groups(preference, config.groups, top_k=self.top_k)
        selection, more = choose(scored, self.preferences(preference, state, inputs), inputs)
        statistics = sum_statistics(
            scored.logits, scored.probs, selection.expert_ids, inputs.token_mask
        )
        statistics = dataclasses.replace(statistics, extra=extra | more)
        return RouterOutput(
            selection=selection,
            logits=scored.logits,
            probs=scored.probs,
            statistics=statistics,
            carry=scored.logits if config.traits.carries_logits else None,
        )

    def preferences(
        self, preference: Float[Array, "T E"], state: Any, inputs: RouterInputs
    ) -> Int[Array, "T K"]:
        """Return the K experts that each token prefers; E marks an empty slot."""
        del state, inputs
        return preferred_experts(preference, top_k=self.top_k)

    def update(self, state: Any, statistics: RouterStatistics, step: Array) -> Any:
        """Return the new state of the bias."""
        if self.config.bias is None:
            return state
        return self.config.bias.update(state, statistics, step, top_k=self.top_k)


TokenChoiceBase.router = TokenChoice


def preferred_experts(preference: Float[Array, "T E"], *, top_k: int) -> Int[Array, "T K"]:
    """Return the K experts of largest preference, the first first, ties to the lower id."""
    return jax.lax.top_k(jax.lax.stop_gradient(preference), top_k)[1]


def choose(
    scored: Scored, preferred: Int[Array, "T K"], inputs: RouterInputs
) -> tuple[Selection, Arrays]:
    """Return the preferred experts, or those that are replayed, with unbiased scores.

    Args:
        scored: Scores of all pairs; those of replayed experts are taken from them too, so that
            they get a gradient.
        preferred: The router's own choice; E marks an empty slot.
        inputs: Inputs of the router.

    Returns:
        The selection, and the statistics of the replay.
    """
    num_experts = scored.logits.shape[1]
    expert_ids = preferred
    extra = dict[str, Array]()
    if inputs.replayed is not None:
        expert_ids, extra = replay_experts(
            preferred, inputs.replayed, inputs.token_mask, num_experts
        )
    source = scored.logits if scored.is_over_chosen else scored.log_scores
    chosen = jnp.take_along_axis(source, expert_ids, axis=-1, mode="fill", fill_value=-jnp.inf)
    if scored.is_over_chosen:
        chosen = jax.nn.log_softmax(chosen, axis=-1)
    return token_major(expert_ids, chosen, inputs.token_mask, num_experts), extra


def score_logits(
    logits: Float[Array, "T E"],
    function: ScoreFunction,
    *,
    groups: GroupLimitConfig | None = None,
    is_over_chosen: bool = False,
    is_log_first: bool = False,
) -> Scored:
    """Score logits by a function that increases with them.

    The preference is the logits, which order as the scores and do not saturate; with a group limit,
    which adds preferences, it is the scores.

    Args:
        logits: f32.
        function: `softmax` over all experts; `sigmoid` of each; `sqrt_softplus`,
            sqrt(log(1 + exp(z))) of each. The last two are divided by their sum over the experts
            for `probs`.
        groups: Group limit of the router.
        is_over_chosen: See `Scored`.
        is_log_first: Computes the log scores of a softmax before its probabilities.
    """
    if function == "softmax":
        # The order of the two decides the order in which their gradients are summed, and with it
        # the last bits of a run.
        probs = None if is_log_first else jax.nn.softmax(logits, axis=-1)
        log_scores = jax.nn.log_softmax(logits, axis=-1)
        probs = jax.nn.softmax(logits, axis=-1) if probs is None else probs
    else:
        is_sigmoid = function == "sigmoid"
        log_scores = jax.nn.log_sigmoid(logits) if is_sigmoid else 0.5 * log_softplus(logits)
        probs = jax.nn.softmax(log_scores, axis=-1)
    preference = logits
    if groups is not None:
        linear = {"softmax": lambda: probs, "sigmoid": lambda: jax.nn.sigmoid(logits)}
        preference = linear.get(function, lambda: jnp.exp(log_scores))()
    return Scored(
        logits=logits,
        log_scores=log_scores,
        probs=probs,
        preference=preference,
        is_over_chosen=is_over_chosen,
    )


def log_softplus(z: Float[Array, "*d"]) -> Float[Array, "*d"]:
    """Compute log(log(1 + exp(z))), finite in value and slope for every finite z."""
    # Below -14 it equals z to the last bit of f32, and exp(z) would underflow.
    is_low = z < -14.0
    return jnp.where(is_low, z, jnp.log(jax.nn.softplus(jnp.where(is_low, 0.0, z))))


def traits_of(bias: SelectionBias | None, jitter: float = 0.0) -> Traits:
    """Return the traits of a member whose options are a bias and jitter."""
    sees_others = bias is not None and bias.traits.sees_others
    return Traits(can_replay=True, sees_others=sees_others, needs_key=jitter > 0.0)
