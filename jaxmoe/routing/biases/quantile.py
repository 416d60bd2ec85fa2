# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Quantile Balancing: each expert's bias is the quantile that gives it its even share, without a
rate.

    a_t  = (K+1)-th largest over i of s_ti + b_i      with the OLD b, which also routes: causal
    r_ti = a_t - s_ti                                 bias at which token t would choose i
    b_i  = (c+1)-th smallest over t of r_ti,          c = floor(n K / E): c tokens below it
    b    = b - mean(b)

One exact half-step on each side of the dual with equalities (`dual.py`) per optimiser step, warm
started. n counts the tokens of the whole step without padding.

    histogram  integer counts of r over [min(b) - 1, max(b) + 1] in `num_bins` bins, one psum with
               the other statistics at the end of the step: bit-equal on every mesh and for every
               number of micro-batches, with an error below one bin
    exact      the order statistic itself, over each micro-batch (all devices, 32 psums); the mean
               over micro-batches, which differs from the quantile of the whole step

Scores in [0, 1] (softmax, sigmoid) keep r within the range; other values are counted in the
outermost bins. With K = E the bias is not updated.

Sources: J. Su, kexue.fm 11619; the histogram follows the appendix of Kimi K3, by secondary
accounts. Readings chosen: values within a bin are taken as evenly spread; `decay` blends as in
Megatron-Core and is off by default.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.routing.base import Arrays, RouterInputs, RouterStatistics
from jaxmoe.routing.biases.base import SelectionBias
from jaxmoe.routing.biases.dual import capacity_of, expert_prices, token_prices
from jaxmoe.routing.biases.histogram import histogram, kth_smallest
from jaxmoe.routing.scopes import is_first, scope_axes, total


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class QuantileConfig(SelectionBias):
    """The bias that would have given each expert its even share of the step's tokens."""

    name: ClassVar[str] = "quantile"

    form: Literal["histogram", "exact"] = "histogram"
    """Quantile of the whole step from a histogram, or exact quantile of each micro-batch."""
    num_bins: int = 1000
    """Number of bins of the histogram."""
    decay: float = 0.0
    """Share of the old bias in the new one."""

    def __post_init__(self):
        if self.num_bins < 2:
            raise ValueError(f"bias.num_bins={self.num_bins} must be at least 2")
        if not 0.0 <= self.decay < 1.0:
            raise ValueError(
                f"bias.decay={self.decay} must be at least 0 (no memory) and below 1 (no change)"
            )

    def prefer(
        self,
        state: Arrays,
        scores: Float[Array, "T E"],
        inputs: RouterInputs,
        *,
        top_k: int,
        train: bool,
    ) -> tuple[Float[Array, "T E"], Arrays]:
        """Return the scores plus the bias; in training also the statistics of the next bias."""
        bias = state["bias"]
        scores = jax.lax.stop_gradient(scores)
        biased = scores + bias[None, :]
        if not train or top_k >= bias.shape[0]:
            return biased, {}
        surplus = (scores - token_prices(biased, top_k=top_k)[:, None])[None]  # 1, T, E
        mask = inputs.token_mask[None, :]
        if self.form == "histogram":
            low, width = self._range(bias)
            counts = histogram(-surplus, mask, low=low, width=width, num_bins=self.num_bins)
            return biased, {"quantile_histogram": counts[0]}
        axes = scope_axes(inputs.extent, "batch")
        num_tokens = total(mask.sum(1, dtype=jnp.int32), axes)
        prices = expert_prices(surplus, mask, num_tokens, top_k=top_k, axes=axes)[0]
        # Every device has the same prices; they enter the sum over devices once.
        share = (num_tokens > 0).astype(jnp.float32) * is_first(axes)
        prices = jnp.where(num_tokens > 0, prices, 0.0)
        return biased, {"quantile_sum": -prices * share, "quantile_batches": share[0]}

    def update(
        self, state: Any, statistics: RouterStatistics, step: Array, *, top_k: int
    ) -> Arrays:
        """Return the quantiles of the step less their mean.

        Statistics of evaluation contain no quantiles and leave the state unchanged.
        """
        del step
        old = state["bias"]
        extra = statistics.extra
        if "quantile_histogram" in extra:
            counts = extra["quantile_histogram"]
            num_tokens = counts[0].sum()
            capacity = capacity_of(num_tokens, top_k=top_k, num_experts=old.shape[0])
            low, width = self._range(old)
            rank = jnp.broadcast_to(capacity + 1, old.shape)
            new = kth_smallest(counts, rank, low=low, width=width)
            is_known = num_tokens > 0
        elif "quantile_sum" in extra:
            batches = extra["quantile_batches"]
            new = extra["quantile_sum"] / jnp.maximum(batches, 1.0)
            is_known = batches > 0.0
        else:
            return state
        new = self.decay * old + (1.0 - self.decay) * (new - new.mean())
        return {"bias": jnp.where(is_known, new, old)}

    def _range(self, bias: Float[Array, " E"]) -> tuple[Array, Array]:
        """Return the lower edge and the width of the bins: r is in [min(b) - 1, max(b) + 1]."""
        low = bias.min() - 1.0
        return low, (bias.max() + 1.0 - low) / self.num_bins
