# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""A big and a small feed-forward, of which each token takes one, or none.

    stage 1, choice "random"   y = FFN_o(x), o uniform over the options in training, else big
    stage 2, choice "router"   p = softmax(x Wr);  o = argmax p;  y = p_o FFN_o(x)
                               loss += weight (mean p_big - target)^2

`context["size_pattern"]` [B S] sets the options instead: with O options layer l takes digit l of
the number in base O, with factor 1; -1 takes in each layer the option with the largest mean p_o
in the sequence. `jaxmoe.contrib.depth.size_oracle` tries all numbers.

Stage 2 starts from the parameters of stage 1 by `--checkpoint.initial.path RUN`. Both sizes are
computed for all tokens: this studies choices and saves no time.

Source: Duo-LLM, arXiv 2410.10846.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Final, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Int

from jaxmoe.declarations import Declaration, declare
from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.context import (
    FeedForwardSizes,
    LayerContext,
    UnroutedFeedForward,
    require_positive,
)
from jaxmoe.layers.feed_forwards.dense import FeedForward
from jaxmoe.layers.records import FeedForwardOutputs, RoutingInputs
from sharding import axes as ax

_TOKENS: Final = (ax.ACT_BATCH, ax.ACT_SEQ)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TwoSizesConfig(UnroutedFeedForward):
    """A big and a small dense SwiGLU, of which each token takes one (Duo-LLM)."""

    name: ClassVar[str] = "two_sizes"
    module_name: ClassVar[str] = "feed_forward"
    width_fields: ClassVar[tuple[str, ...]] = ("big_dim", "small_dim")

    big_dim: int = 512
    """Hidden units of the big feed-forward."""
    small_dim: int = 32
    """Hidden units of the small feed-forward."""
    options: Literal["small_big", "skip_small_big"] = "small_big"
    """What a token can take; skip computes nothing."""
    choice: Literal["random", "router"] = "random"
    """Who chooses: a draw in training (stage 1), or a router (stage 2)."""
    target: float = 0.5
    """Mean probability of big that the router is trained to."""
    budget_weight: float = 1.0
    """Factor of (mean probability of big - target)^2 in the loss, for a router."""

    def __post_init__(self):
        require_positive("two_sizes", self, "big_dim", "small_dim")
        if not 0.0 <= self.target <= 1.0:
            raise ValueError(f"two_sizes.target={self.target} must be between 0 and 1")
        if self.budget_weight < 0:
            raise ValueError(f"two_sizes.budget_weight={self.budget_weight} must be 0 or more")

    @property
    def num_sizes(self) -> int:
        """Number of options (O); the last one is big."""
        return len(self.options.split("_"))

    @property
    def sizes(self) -> FeedForwardSizes:
        """Sizes that plans read."""
        return FeedForwardSizes(dense_dim=self.big_dim + self.small_dim)

    def budget_loss(self, big: Float[Array, "B S"], mask: Array) -> Float[Array, ""]:
        """Return weight (mean of `big` - target)^2.

        Args:
            big: Probability of the big feed-forward.
            mask: False for padding.
        """
        number = jnp.maximum(jnp.sum(mask, dtype=jnp.float32), 1.0)
        mean = jnp.sum(jnp.where(mask, big, 0.0)) / number
        return jnp.float32(self.budget_weight) * (mean - jnp.float32(self.target)) ** 2

    def build(
        self,
        context: LayerContext,
        execution: ExecutionConfig,
        *,
        train: bool,
        name: str | None = None,
    ) -> TwoSizes:
        """Return the module of one layer; see `DenseConfig.build`."""
        return TwoSizes(self, context.embed_dim, execution, train, name=name)


class TwoSizes(nn.Module):
    """One layer of a big and a small feed-forward."""

    config: TwoSizesConfig
    embed_dim: int
    execution: ExecutionConfig
    train: bool

    @nn.compact
    def __call__(
        self, x: Float[Array, "B S D"], routing: RoutingInputs
    ) -> tuple[Float[Array, "B S D"], FeedForwardOutputs]:
        """Compute the layer.

        Args:
            x: Normed input.
            routing: Mask, key, number of the layer, and number of each token.

        Returns:
            The output in the compute dtype, and the loss of the budget.
        """
        config = self.config
        number = self.config.num_sizes
        small, big = (
            FeedForward(self.embed_dim, hidden, self.execution, name=name)(x)[0]
            for name, hidden in (("small", config.small_dim), ("big", config.big_dim))
        )
        probs = self._probabilities(x)  # in both stages, for one set of parameters
        is_routed = config.choice == "router"
        pattern = routing.context.get("size_pattern")
        layer = routing.layer
        if pattern is not None and layer is not None:
            digits = pattern // jnp.int32(number) ** layer % jnp.int32(number)
            if is_routed:
                means = jnp.mean(probs, axis=1, keepdims=True)
                digits = jnp.where(
                    pattern < 0, jnp.argmax(means, axis=-1).astype(jnp.int32), digits
                )
            share = jax.nn.one_hot(digits, number)
        elif is_routed:
            share = probs * jax.nn.one_hot(jnp.argmax(probs, axis=-1), number)
        else:
            share = jax.nn.one_hot(self._draw(routing), number)
        share = share.astype(x.dtype)
        y = small * share[..., -2:-1] + big * share[..., -1:]
        losses = {}
        if self.train and is_routed:
            losses = {"size_budget": config.budget_loss(probs[..., -1], routing.token_mask)}
        return y, FeedForwardOutputs(losses=losses)

    def _probabilities(self, x: Float[Array, "B S D"]) -> Float[Array, "B S O"]:
        shape = (self.embed_dim, self.config.num_sizes)
        axes = (ax.EMBED, ax.ROUTER_OUT)
        weight = declare(self, "router", Declaration(shape=shape, axes=axes, role="router"))

        def run(x, weight, *, batch_axes):
            del batch_axes
            wide = x.astype(jnp.float32)
            return jax.nn.softmax(jnp.einsum("bsd,do->bso", wide, weight), axis=-1)

        tokens = (*_TOKENS, None)
        placement = self.execution.placement
        return placement.region(run, in_axes=(tokens, (None, None)), out_axes=tokens)(x, weight)

    def _draw(self, routing: RoutingInputs) -> Int[Array, "B S"]:
        """Return an option for each token: drawn in training, else the big one."""
        number = self.config.num_sizes
        if not self.train:
            return jnp.zeros_like(routing.context["index"]) + jnp.int32(number - 1)
        if routing.key is None:
            raise ValueError("two_sizes.choice=random draws in training: pass key=")

        def run(index, key, *, batch_axes):
            del batch_axes
            keys = jax.vmap(jax.vmap(lambda one: jax.random.fold_in(key, one)))(index)
            return jax.vmap(jax.vmap(lambda one: jax.random.randint(one, (), 0, number)))(keys)

        region = self.execution.placement.region(run, in_axes=(_TOKENS, ()), out_axes=_TOKENS)
        return region(routing.context["index"], routing.key)
