# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Load-balancing loss of one layer:

    L = E * sum_i f_i P_i,   f_i = counts_i / sum(counts),   P_i = prob_sum_i / num_tokens

f has no gradient. L is 1 for a uniform router, the unit of this library, and may be lower if f and
P are anti-correlated. `conversions` gives the value in the units of other libraries.

    global       f over the whole batch: all devices and all micro-batches
                 (`jaxmoe.training.balance` where there are several)
    micro_batch  f over each micro-batch, all devices
    sequence     f over each row of the batch; the mean over rows

Sources: Switch Transformers (arXiv 2101.03961, eq. 4); the global batch and its motivation, arXiv
2501.11873; sequences, DeepSeek-V3 (arXiv 2412.19437, section 2.1.2).
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.routing.balancers.base import BalancerTraits, BalanceScope, StatisticsBalancer
from jaxmoe.routing.base import Arrays, RouterInputs, RouterOutput, RouterStatistics
from jaxmoe.routing.scopes import is_first, split_scopes, total


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LoadBalanceConfig(StatisticsBalancer):
    """Load-balancing loss, over the global batch by default."""

    name: ClassVar[str] = "load_balance"

    coefficient: float = 0.01
    """Weight in the loss; the unweighted value is 1.0 for a uniform router."""
    scope: BalanceScope = "global"
    """Tokens over which the load is summed: the whole batch, each micro-batch, or each row."""

    @property
    def traits(self) -> BalancerTraits:
        """Evens the load of its scope; the one that other libraries have."""
        return BalancerTraits(evens_load=True, is_auxiliary_loss=True, scope=self.scope)

    def observe(self, output: RouterOutput, inputs: RouterInputs) -> Arrays:
        """Return the summed losses of the rows if the scope is `sequence`."""
        return sequence_balance(output, inputs) if self.scope == "sequence" else {}

    def per_layer(self, statistics: RouterStatistics, *, num_free: int) -> Float[Array, "*L"]:
        """Return the unweighted loss of each layer."""
        del num_free
        if self.scope != "sequence":
            return load_balance(statistics)
        rows = jnp.maximum(statistics.extra["num_rows"], 1.0)
        return statistics.extra["row_balance_sum"] / rows


def sequence_balance(output: RouterOutput, inputs: RouterInputs) -> Arrays:
    """Compute `row_balance_sum`, the sum of the rows' losses, and `num_rows`, the non-empty rows.

    Args:
        output: Token-major output for these inputs.
        inputs: Whole rows, or rows whose positions are spread over `extent.sequence_axes`.
    """
    extent = inputs.extent
    num_experts = output.probs.shape[1]
    axes = extent.sequence_axes
    mask = inputs.token_mask[:, None]
    ids = output.selection.expert_ids
    ids = ids.reshape(mask.shape[0], ids.size // max(mask.shape[0], 1))  # T, K
    experts = jnp.arange(num_experts, dtype=ids.dtype)
    chosen = (ids[:, :, None] == experts[None, None, :]).sum(1).astype(jnp.float32)
    parts = (chosen, jnp.where(mask, output.probs, 0.0), mask.astype(jnp.float32))
    counts, prob_sum, tokens = (
        total(split_scopes(part, extent, "sequence").sum(1), axes) for part in parts
    )
    share = counts / jnp.maximum(counts.sum(-1, keepdims=True), 1.0)
    values = num_experts * jnp.sum(
        jax.lax.stop_gradient(share) * prob_sum / jnp.maximum(tokens, 1.0), axis=-1
    )
    # Every device of a row has the loss of the whole row; it enters the sum over devices once.
    once = is_first(axes)
    is_real = (tokens[:, 0] > 0.0).astype(jnp.float32)
    return {"row_balance_sum": values.sum() * once, "num_rows": is_real.sum() * once}


def load_balance(statistics: RouterStatistics) -> Float[Array, "*L"]:
    """Compute the unweighted load-balancing loss per layer; 1.0 for a uniform router.

    Args:
        statistics: Statistics summed over a batch; may be stacked over layers.

    Returns:
        One number per layer; 0 if there are no tokens but padding.
    """
    counts = jax.lax.stop_gradient(statistics.counts)
    share = counts / jnp.maximum(counts.sum(-1, keepdims=True), 1.0)
    prob = statistics.prob_sum / jnp.maximum(statistics.num_tokens, 1.0)[..., None]
    return counts.shape[-1] * jnp.sum(share * prob, axis=-1)


def pool_layers(statistics: RouterStatistics) -> RouterStatistics:
    """Sum the statistics over layers, for losses that pool all layers.

    Args:
        statistics: Statistics summed over a batch; may be stacked over layers.
    """
    layers = tuple(range(statistics.num_tokens.ndim))
    return jax.tree.map(lambda leaf: leaf.sum(layers), statistics)


def conversions(value: float, *, top_k: int, pooled: float | None = None) -> dict[str, float]:
    """Convert the load-balancing loss to the units of other libraries, before their coefficients.

    Args:
        value: Loss in the unit of jaxmoe, 1.0 for a uniform router: one layer's, or the mean over
            layers.
        top_k: K.
        pooled: Loss of all layers pooled, `load_balance(pool_layers(statistics))`; needed for
            `huggingface` with several layers, equal to `value` with one.

    Returns:
        `megatron` and `megablocks` count assignments, as jaxmoe does; Megatron adds the layers, as
        jaxmoe does in the loss, and MegaBlocks averages them. `huggingface` (transformers 5.23)
        pools the tokens of all layers, so that layers with opposite preferences look balanced, and
        counts tokens, so that a uniform router has K: K * pooled.
    """
    return {
        "jaxmoe": value,
        "megatron": value,
        "megablocks": value,
        "huggingface": (value if pooled is None else pooled) * top_k,
    }
