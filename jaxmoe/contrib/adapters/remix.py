# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""ReMix: each token has k of n low-rank additions with one constant weight (arXiv 2603.10160).

    y = x W + w sum_j (x A_J(j)) B_J(j)        w = alpha / (k r), or alpha / (sqrt(k) r); alpha 2
    training     J of k members without replacement from q = softmax(h P), h the normed input
    inference    J the k members of largest q

    log q(J) = sum_j log q_J(j) - log(1 - q_J(1) - ... - q_J(j-1))

No gradient goes through a constant weight: P is trained by REINFORCE with the mean of M = `draws`
passes as baseline (`repeated.py`), A and B by the gradients of the drawn additions. A
draw is that of the k largest of log q plus Gumbel noise, in their order.

The paper prints both weights: `weight` chooses. L is the cross-entropy of a row, whose tokens share
an advantage, which has less variance than that of a batch; h is a constant in log q, so that A and
B have ordinary gradients alone. The loss `adapter_router` has the router's gradient; its value says
nothing about the model.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar, Final, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from jaxmoe.adapters.factors import TRAINED
from jaxmoe.contrib.adapters.mixed import FactorTraits, Made, MixedAdapter
from jaxmoe.contrib.adapters.mixtures import Gates
from jaxmoe.contrib.adapters.repeated import ADVANTAGE
from jaxmoe.declarations import Declaration
from jaxmoe.field_docs import with_field_docs
from jaxmoe.layers.view import HalfInputs, Losses
from sharding import axes as ax
from sharding.constrain import Placement
from sharding.products.tensor_parallel import Product, along_stream

_ROWS: Final = (ax.ACT_BATCH, ax.ACT_SEQ)
_STREAM: Final = (*_ROWS, ax.ACT_EMBED)


@with_field_docs
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RemixConfig(MixedAdapter):
    """Low-rank additions chosen by a router of the token (ReMix); all else is frozen."""

    name: ClassVar[str] = "remix"
    reads: ClassVar[tuple[str, ...]] = (ADVANTAGE,)
    backward: ClassVar[str | None] = "repeated"

    members: int = 8
    """Additions to each matrix."""
    alpha: float = 2.0
    """An addition is multiplied with alpha / rank, and that with `weight`."""
    top_k: int = 2
    """Additions of a token."""
    weight: Literal["mean", "root"] = "root"
    """Weight of each addition of a token: mean 1 / top_k, root 1 / sqrt(top_k)."""
    draws: int = 4
    """Draws of the additions that a step compares to train the router, with a pass over its rows
    for each; at least 2."""

    @property
    def factor_traits(self) -> FactorTraits:
        """Properties of the factors of all additions."""
        return FactorTraits(share=self.top_k / self.members)

    def check_fields(self) -> None:
        """Raise a ValueError for invalid values."""
        if not 1 <= self.top_k <= self.members:
            raise ValueError(
                f"adapter.top_k={self.top_k} must be at least 1 and at most"
                f" adapter.members={self.members}"
            )
        if self.draws < 2:
            raise ValueError(
                f"adapter.draws={self.draws} must be at least 2: the router is trained by the"
                " loss of a draw beside those of the others"
            )

    def note_on(self, steps: int) -> str:
        """Return the passes of a step; see the base class."""
        del steps
        return f"{self.draws} passes over each row, after as many without a gradient"

    def half_parameters(self, width: int) -> Made:
        """Return the router P of half a layer."""
        router = Declaration(shape=(width, self.members), axes=(ax.EMBED, ax.RANK), role="adapter")
        return {"router": (router, TRAINED)}

    def mix(
        self, params: dict[str, Array], half: HalfInputs, placement: Placement, *, train: bool
    ) -> tuple[Gates | None, Losses]:
        """Return the additions of the tokens, and in training the loss of their draw."""
        if not params:
            return None, {}
        x = jax.lax.stop_gradient(half.x.astype(jnp.float32))
        router = params["router"].astype(jnp.float32)
        product = Product("bsd,dn->bsn", router, (None, None), _STREAM, jnp.float32)
        logits = along_stream(x, {"router": product}, placement)["router"]
        is_drawn = train and half.key is not None
        count = self.top_k if self.weight == "mean" else math.sqrt(self.top_k)

        def choose(
            logits: Array, index: Array, key: Any, *, batch_axes: tuple[str, ...]
        ) -> tuple[Array, Array]:
            del batch_axes
            ids = draw(logits, index, key, self.top_k) if is_drawn else largest(logits, self.top_k)
            chosen = jnp.sum(jax.nn.one_hot(ids, self.members, dtype=jnp.float32), axis=-2)
            return chosen[:, :, None] / jnp.float32(count), log_prob(logits, ids)

        region = placement.region(
            choose,
            in_axes=(_STREAM, _ROWS, () if is_drawn else {}),
            out_axes=((*_ROWS, None, None), _ROWS),
        )
        key = half.key if is_drawn else {}
        values, logs = region(logits, half.context["index"], key)
        losses: Losses = {}
        if is_drawn and ADVANTAGE in half.context:
            losses = {"adapter_router": router_loss(logs, half.context[ADVANTAGE], half)}
        return Gates(values=jax.lax.stop_gradient(values)), losses


def router_loss(
    logs: Float[Array, "B S"], advantage: Float[Array, "B S"], half: HalfInputs
) -> Float[Array, ""]:
    """Return the sum of advantage times log q(J), whose gradient is the estimate.

    Args:
        logs: log q of the draw of each token.
        advantage: See `repeated.py`.
        half: Input of the half, for its padding.
    """
    mask: Bool[Array, "B S"] = half.token_mask
    return jnp.sum(jnp.where(mask, jax.lax.stop_gradient(advantage) * logs, 0.0))


def largest(logits: Float[Array, "B S n"], top_k: int) -> Int[Array, "B S k"]:
    """Return the members of largest logit, the largest first."""
    return jax.lax.top_k(logits, top_k)[1]


def draw(
    logits: Float[Array, "B S n"], index: Int[Array, "B S"], key: Key[Array, ""], top_k: int
) -> Int[Array, "B S k"]:
    """Return members drawn from softmax(logits) without replacement, in their order.

    Args:
        logits: Logits of each token.
        index: Number of each token, from which its random numbers follow on every mesh.
        key: PRNG key.
        top_k: Members of a token.
    """
    keys = jax.vmap(jax.vmap(lambda number: jax.random.fold_in(key, number)))(index)
    noise = jax.vmap(
        jax.vmap(lambda key_of_head: jax.random.gumbel(key_of_head, logits.shape[2:]))
    )(keys)
    return largest(logits + noise, top_k)


def log_prob(logits: Float[Array, "*T n"], ids: Int[Array, "*T k"]) -> Float[Array, "*T"]:
    """Return the log-probability of drawing members in this order, without replacement.

    Args:
        logits: Logits of the members.
        ids: Members, the first drawn first.
    """
    total = jnp.zeros(logits.shape[:-1])
    remaining = logits
    for place in range(ids.shape[-1]):
        is_chosen = jax.nn.one_hot(ids[..., place], logits.shape[-1], dtype=jnp.bool_)
        chosen_logit = jnp.sum(jnp.where(is_chosen, logits, 0.0), axis=-1)
        total += chosen_logit - jax.nn.logsumexp(remaining, axis=-1)
        remaining = jnp.where(is_chosen, -jnp.inf, remaining)
    return total
