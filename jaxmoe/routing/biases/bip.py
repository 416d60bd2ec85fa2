# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""BIP balancing: the biases approximately solve the balanced assignment of the current tokens.

    repeat:           p_t = max(0, (K+1)-th largest over i of s_ti - q_i)
                      q_i = max(0, (c+1)-th largest over t of s_ti - p_t),    c = floor(n K / E)
    choose the K largest of s_t - q

n counts the tokens of a scope without padding. Each half-step minimises the dual of `dual.py`
exactly in its own variables. A round moves only the overloaded experts, so that the rounds it
takes depend on the scores: from zero, 4 left max violations of up to 2.6 while training. After
`iterations` rounds T they therefore go on, at most to `max_iterations`, until no expert of the
scope has more than 1 + `max_violation` times its share, or one token more than it, or a round
changes nothing. The bias is -q. The last q_i is the middle of the interval on which the dual is
flat, from the (c+1)-th to the c-th largest: at its end tokens tie, and rounding would decide.

    batch      q is solved for the tokens that are then routed: even from the first step, and a
               token's experts depend on later tokens
    histogram  the same, with the column statistic from a histogram of `num_bins` over (0, 1]: one
               psum per iteration instead of 32, in space independent of the number of tokens
    online     causal: routes with the q of the steps before. State is q and a histogram of the
               surpluses s_ti - p_t in (0, 1] for each expert, multiplied by `decay` at each step.
               After a step p is computed with the q that routed it, the surpluses are added to the
               histogram, and q is the value that the share K/E of its mass exceeds. T, start and
               scope have no effect, and no bound holds: new tokens meet old prices

No bound on the violation holds for all scores. What does: no half-step increases the dual, and if
rounds end while prices still change, before `max_iterations`, the limit of the line above is kept.
Alternating minimisation may stop before the optimum, and where tokens are alike no price separates
them: identical tokens have the same experts. Max violations of `batch` seen with softmax scores,
8 experts, K = 2 and n K / E = 128 (the largest of six seeds): 0.10 for normal logits up to a scale
of 16 with a preference of 3 for some experts, 0.91 and 1.7 at scales of 32 and 64, where softmax
saturates; 0.15 for logits of a Cauchy distribution; 0.84 for four clusters of tokens that differ by
1e-3 in their logits, 0.48 for eight; 0.93 and 0.60 where they differ by 1e-5, with any number of
rounds. With 32 tokens for each expert normal logits reach 0.19, with 8 0.38. `histogram` needs
scores that differ by more than a bin, 1 / `num_bins`; saturated ones do not (up to 1.8).

In evaluation all three route with the q in the state; for the first two it is the mean over the
scopes of the last step. Scores should be in [0, 1] (softmax, sigmoid); a histogram counts larger
surpluses as 1, and exact `batch` accepts any. Sigmoid scores converge slowly, and stop far from
balance where they saturate, because the clip only lowers overloaded experts: no bound holds, and
`quantile` has no clip.

Source: arXiv 2502.15451, through J. Su's analysis (kexue.fm); algorithms 1 to 4 were not available.
Readings chosen: q starts from zero in each scope unless `start` is "state"; the token-by-token heap
of the paper's online form is replaced by the decaying histogram over steps; T = 4, and more rounds
where they are needed (`max_iterations=1` leaves exactly T).
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.routing.base import Arrays, RouterInputs, RouterStatistics
from jaxmoe.routing.biases.base import BiasTraits, SelectionBias
from jaxmoe.routing.biases.dual import between, capacity_of, expert_prices, token_prices
from jaxmoe.routing.biases.histogram import histogram, kth_smallest
from jaxmoe.routing.scopes import Scope, is_first, join_scopes, scope_axes, split_scopes, total


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BipConfig(SelectionBias):
    """Expert prices by alternating exact minimisation of the dual of the balanced assignment."""

    name: ClassVar[str] = "bip"

    form: Literal["batch", "histogram", "online"] = "batch"
    """Prices from the current tokens, exact or by histogram, or from earlier steps (causal)."""
    iterations: int = 4
    """Least number of rounds T over token and expert prices; for batch and histogram."""
    max_iterations: int = 64
    """Most rounds, where those of `iterations` leave an expert overloaded; no effect if lower."""
    max_violation: float = 0.1
    """Load over the fair share, minus 1, above which rounds go on; rounds may end above it."""
    start: Literal["zero", "state"] = "zero"
    """Prices before the first round: zero, or those of the last step; for batch and histogram."""
    scope: Scope = "sequence"
    """Tokens that are solved together; for batch and histogram."""
    num_bins: int = 1000
    """Number of bins; for histogram and online."""
    decay: float = 0.9
    """Factor of the histogram at each step; 1 keeps all history. For online."""

    def __post_init__(self):
        for field in ("iterations", "max_iterations", "num_bins"):
            if getattr(self, field) < 1:
                raise ValueError(f"bias.{field}={getattr(self, field)} must be at least 1")
        if not self.max_violation >= 0.0:
            raise ValueError(f"bias.max_violation={self.max_violation} must not be negative")
        if not 0.0 <= self.decay <= 1.0:
            raise ValueError(
                f"bias.decay={self.decay} must lie between 0 (the last step alone) and 1 (all)"
            )

    @property
    def traits(self) -> BiasTraits:
        """Looks at the other tokens of its scope, unless it is `online`."""
        return BiasTraits(sees_others=self.form != "online")

    def init(self, num_experts: int) -> Arrays:
        """Return prices of zero."""
        state = SelectionBias.init(self, num_experts)
        if self.form == "online":
            state["histogram"] = jnp.zeros((num_experts, self.num_bins), jnp.float32)
        return state

    def prefer(
        self,
        state: Arrays,
        scores: Float[Array, "T E"],
        inputs: RouterInputs,
        *,
        top_k: int,
        train: bool,
    ) -> tuple[Float[Array, "T E"], Arrays]:
        """Return scores less prices: the scope's in training, the state's in evaluation."""
        scores = jax.lax.stop_gradient(scores)
        biased = scores + state["bias"][None, :]
        if not train:
            return biased, {}
        if self.form == "online":
            surplus = scores - jnp.maximum(token_prices(biased, top_k=top_k), 0.0)[:, None]
            mask = inputs.token_mask[None, :] & jnp.ones((1, 1), bool)
            return biased, {"bip_histogram": self._counts(surplus[None], mask)[0]}
        axes = scope_axes(inputs.extent, self.scope)
        grouped = split_scopes(scores, inputs.extent, self.scope)  # G, n, E
        mask = split_scopes(inputs.token_mask, inputs.extent, self.scope)
        start = state["bias"] if self.start == "state" else jnp.zeros_like(state["bias"])
        further_axes = tuple(a for a in scope_axes(inputs.extent, "batch") if a not in axes)
        prices = self.solve(grouped, mask, -start, top_k=top_k, axes=axes, other_axes=further_axes)
        num_tokens = total(mask.sum(1, dtype=jnp.int32), axes)
        # Every device of a scope has the same prices; they enter the sum over devices once.
        share = (num_tokens > 0).astype(jnp.float32) * is_first(axes)
        extra = {"bip_price_sum": (prices * share[:, None]).sum(0), "bip_scopes": share.sum()}
        return join_scopes(grouped - prices[:, None, :]), extra

    def update(
        self, state: Any, statistics: RouterStatistics, step: Array, *, top_k: int
    ) -> Arrays:
        """Return the prices of the step, for evaluation and, online, for the next step.

        Statistics of evaluation contain no prices and leave the state unchanged.
        """
        del step
        extra = statistics.extra
        if "bip_histogram" in extra:
            counts = self.decay * state["histogram"] + extra["bip_histogram"].astype(jnp.float32)
            mass = counts.sum(-1)
            rank = mass * (1.0 - top_k / counts.shape[0])
            prices = self._read(counts, rank)
            return {"bias": jnp.where(mass > 0.0, -prices, state["bias"]), "histogram": counts}
        if "bip_scopes" not in extra:
            return state
        mean = extra["bip_price_sum"] / jnp.maximum(extra["bip_scopes"], 1.0)
        return {"bias": jnp.where(extra["bip_scopes"] > 0.0, -mean, state["bias"])}

    def solve(
        self,
        scores: Float[Array, "G n E"],
        mask: Bool[Array, "G n"],
        prices: Float[Array, " E"],
        *,
        top_k: int,
        axes: tuple[str, ...] = (),
        other_axes: tuple[str, ...] = (),
    ) -> Float[Array, "G E"]:
        """Compute q of each scope; a scope's rounds depend on its own tokens only.

        Args:
            scores: Scores in [0, 1] of the rows on this device, f32.
            mask: False for padding.
            prices: Prices q before the first round.
            top_k: K.
            axes: Mesh axes over which the rows of a scope are spread.
            other_axes: Mesh axes over which scopes are spread, whose devices loop together.
        """
        num_tokens = total(mask.sum(1, dtype=jnp.int32), axes)
        capacity = capacity_of(num_tokens, top_k=top_k, num_experts=scores.shape[2])
        fair = num_tokens.astype(jnp.float32) * (top_k / scores.shape[2])
        limit = jnp.floor((1.0 + self.max_violation) * fair).astype(jnp.int32)
        limit = jnp.maximum(limit, capacity + 1)

        def once(q: Array) -> tuple[Array, Array]:
            """Return q after one round, and the price to route with."""
            p = jnp.maximum(token_prices(scores - q[:, None, :], top_k=top_k), 0.0)
            surplus = scores - p[:, :, None]
            options = {"top_k": top_k, "axes": axes}
            if self.form == "histogram":
                q = jnp.maximum(self._column_prices(surplus, mask, num_tokens, **options), 0.0)
                return q, q
            q = jnp.maximum(expert_prices(surplus, mask, num_tokens, **options), 0.0)
            middle = between(surplus, mask, q, num_tokens, **options)
            return q, jnp.where(q > 0.0, middle, q)

        def is_over(price: Array) -> Array:
            """Return whether an expert of each scope exceeds the limit."""
            counts = total(_loads(scores - price[:, None, :], mask, top_k=top_k), axes)
            return counts.max(-1) > limit

        def again(carry: tuple[Array, ...]) -> tuple[Array, ...]:
            number, _, q, price, was_over = carry
            new_q, new_price = once(q)
            over = was_over & is_over(new_price) & (new_q != q).any(-1)
            # Scopes that are even keep their price.
            q = jnp.where(was_over[:, None], new_q, q)
            price = jnp.where(was_over[:, None], new_price, price)
            return number + 1, total(over.sum(dtype=jnp.int32), other_axes), q, price, over

        q, price = once(jnp.broadcast_to(prices[None, :], (scores.shape[0], prices.shape[0])))
        q, price = jax.lax.fori_loop(1, self.iterations, lambda _, pair: once(pair[0]), (q, price))
        over = is_over(price)
        start = (
            jnp.int32(self.iterations),
            total(over.sum(dtype=jnp.int32), other_axes),
            q,
            price,
            over,
        )
        return jax.lax.while_loop(
            lambda carry: (carry[0] < self.max_iterations) & (carry[1] > 0), again, start
        )[3]

    def _column_prices(
        self,
        surplus: Float[Array, "G n E"],
        mask: Bool[Array, "G n"],
        num_tokens: Int[Array, " G"],
        *,
        top_k: int,
        axes: tuple[str, ...],
    ) -> Float[Array, "G E"]:
        """Return the (c+1)-th largest of each column from its histogram; 0 if not positive."""
        counts = total(self._counts(surplus, mask), axes)
        capacity = capacity_of(num_tokens, top_k=top_k, num_experts=surplus.shape[2])
        rank = jnp.broadcast_to((num_tokens - capacity)[:, None], counts.shape[:2])
        return self._read(counts, rank)

    def _counts(
        self, surplus: Float[Array, "G n E"], mask: Bool[Array, "G n"]
    ) -> Int[Array, "G E bins"]:
        """Return the histogram of surpluses over [0, 1]; non-positive ones are in the first bin."""
        low = jnp.float32(0.0)
        width = jnp.float32(1.0 / self.num_bins)
        return histogram(surplus, mask, low=low, width=width, num_bins=self.num_bins)

    def _read(self, counts: Array, rank: Array) -> Array:
        """Return the price that `rank` of the surpluses do not exceed; 0 within the first bin."""
        width = jnp.float32(1.0 / self.num_bins)
        rank = jnp.maximum(rank.astype(jnp.float32), 0.0)
        price = kth_smallest(counts, rank, low=jnp.float32(0.0), width=width)
        return jnp.where(price < width, 0.0, price)


def _loads(
    preference: Float[Array, "G n E"], mask: Bool[Array, "G n"], *, top_k: int
) -> Int[Array, "G E"]:
    """Return the tokens of each expert if every token takes its K largest."""
    _, ids = jax.lax.top_k(preference, top_k)
    num_scopes, num_tokens, num_experts = preference.shape
    scopes = jnp.arange(num_scopes, dtype=ids.dtype)[:, None, None]
    bins = (scopes * ids.dtype.type(num_experts) + ids).reshape(-1)
    ones = jnp.broadcast_to(mask[:, :, None], (num_scopes, num_tokens, top_k)).astype(jnp.int32)
    counts = jax.ops.segment_sum(ones.reshape(-1), bins, num_segments=num_scopes * num_experts)
    return counts.reshape(num_scopes, num_experts)
