# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Load metrics of routers from their additive statistics.

load               counts / sum(counts); 1/E is fair
max violation      max(counts) / mean(counts) - 1; 0 is balanced
min violation      1 - min(counts) / mean(counts); 1 is a dead expert
avg violation      mean |counts / mean(counts) - 1|
load entropy       H(load) / log E; 1 is balanced
effective experts  exp(H(load)); E is balanced
router entropy     mean over tokens of H(p) / log E
dropped            1 - sum(kept) / sum(counts), without what a capacity has added
added              assignments that the router did not choose over sum(counts), with a capacity that
                   adds (jaxmoe/routing/token_rounding.py)
dead               share of experts without a token
local activation   share of the assignments whose expert is on the token's device, where tokens move
                   to their experts' (jaxmoe/contrib/token_routes/token_shuffle.py)
replayed           share of the assignments that were recorded elsewhere (jaxmoe/routing/replay.py)
replay changed     share of those that the router itself would not have chosen

Where nothing is routed, as in a batch of padding, violations and shares are 0.

`LoadWindow` accumulates loads over steps: experts that are overloaded in turn are balanced over a
window. `watch_state` summarises biases.
"""

from __future__ import annotations

import typing
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float

from jaxmoe.routing.balancers import load_balance, pool_layers, router_z
from jaxmoe.routing.base import RouterStatistics
from jaxmoe.routing.capacity import ADDED
from jaxmoe.routing.replay import REPLAYED

LOCAL_ASSIGNMENTS = "local_assignments"
"""Statistic in `RouterStatistics.extra` [3]: assignments that are computed, those local after
tokens have moved, those that would be local without; only where tokens move."""


def load(statistics: RouterStatistics) -> Float[Array, "*L E"]:
    """Return the share of the assignments that each expert receives, before drops."""
    total = jnp.maximum(statistics.counts.sum(-1, keepdims=True), 1.0)
    return statistics.counts / total


def max_violation(statistics: RouterStatistics) -> Float[Array, "*L"]:
    """Return the largest load over the mean load, minus 1 (arXiv 2408.15664, eq. 4)."""
    violation = load(statistics).max(-1) * statistics.counts.shape[-1] - 1.0
    return jnp.where(_is_routed(statistics), violation, 0.0)


def dropped_fraction(statistics: RouterStatistics) -> Float[Array, "*L"]:
    """Return the share of the assignments that were dropped by the capacity; 0 without any."""
    kept = statistics.kept.sum(-1) - statistics.extra.get(ADDED, 0.0)
    dropped = 1.0 - kept / jnp.maximum(statistics.counts.sum(-1), 1.0)
    return jnp.where(_is_routed(statistics), dropped, 0.0)


def _is_routed(statistics: RouterStatistics) -> Bool[Array, "*L"]:
    """Return whether a layer has an assignment."""
    return statistics.counts.sum(-1) > 0.0


def summarise(statistics: RouterStatistics) -> dict[str, Float[Array, ""]]:
    """Return scalar metrics: means over layers, and the worst layer's max violation.

    Args:
        statistics: Statistics summed over the batch, stacked over layers.
    """
    share = load(statistics)
    num_experts = statistics.counts.shape[-1]
    log_experts = jnp.log(jnp.float32(max(num_experts, 2)))
    entropy = -jnp.sum(jax.scipy.special.xlogy(share, share), axis=-1)
    tokens = jnp.maximum(statistics.num_tokens, 1.0)
    violation = max_violation(statistics)
    is_routed = _is_routed(statistics)
    least = jnp.where(is_routed, 1.0 - num_experts * share.min(-1), 0.0)
    mean_violation = jnp.abs(num_experts * share - 1.0).mean(-1)
    return {
        "load_balance": load_balance(statistics).mean(),
        "load_balance_pooled": load_balance(pool_layers(statistics)),
        "router_z": router_z(statistics).mean(),
        "max_violation": violation.mean(),
        "max_violation_worst": violation.max(),
        "min_violation": least.mean(),
        "avg_violation": jnp.where(is_routed, mean_violation, 0.0).mean(),
        "load_entropy": entropy.mean() / log_experts,
        "effective_experts": jnp.exp(entropy).mean(),
        "router_entropy": (statistics.entropy_sum / tokens).mean() / log_experts,
        "dropped_fraction": dropped_fraction(statistics).mean(),
        "dead_fraction": jnp.mean(statistics.counts == 0.0, dtype=jnp.float32),
        **_sums(statistics),
        **_local_activation(statistics),
        **_replay(statistics),
    }


def _sums(statistics: RouterStatistics) -> dict[str, Float[Array, ""]]:
    """Return the share of the assignments that were added; empty if a capacity adds none."""
    if ADDED not in statistics.extra:
        return {}
    share = statistics.extra[ADDED] / jnp.maximum(statistics.counts.sum(-1), 1.0)
    return {"added_fraction": share.mean()}


def _local_activation(statistics: RouterStatistics) -> dict[str, Float[Array, ""]]:
    """Return the local activation after tokens have moved and without; empty if they stay."""
    if LOCAL_ASSIGNMENTS not in statistics.extra:
        return {}
    number, moved, still = jnp.moveaxis(statistics.extra[LOCAL_ASSIGNMENTS], -1, 0)
    number = jnp.maximum(number, 1.0)
    return {
        "local_activation": (moved / number).mean(),
        "local_activation_unmoved": (still / number).mean(),
    }


def _replay(statistics: RouterStatistics) -> dict[str, Float[Array, ""]]:
    """Return the shares of assignments that were replayed and changed; empty without a record."""
    if REPLAYED not in statistics.extra:
        return {}
    number, replay_sum = jnp.moveaxis(statistics.extra[REPLAYED], -1, 0)
    total = jnp.maximum(statistics.counts.sum(), 1.0)
    changed = 1.0 - replay_sum.sum() / jnp.maximum(number.sum(), 1.0)
    return {
        "replayed": number.sum() / total,
        "replay_changed": jnp.where(number.sum() > 0.0, changed, 0.0),
    }


def watch_state(router_state: Any) -> dict[str, Float[Array, ""]]:
    """Return range and largest absolute value of the selection bias in the worst layer.

    Args:
        router_state: Router state stacked over layers; biases are its leaves named `bias`.

    Returns:
        `bias_range` and `bias_max`; empty if there is no bias.
    """
    biases = _leaves_named(router_state, "bias")
    if not biases:
        return {}
    spans = [(bias.max(-1) - bias.min(-1)).max() for bias in biases]
    sizes = [jnp.abs(bias).max() for bias in biases]
    return {"bias_range": jnp.stack(spans).max(), "bias_max": jnp.stack(sizes).max()}


# Records are not type-checked at run time: tree functions also fill them with shapes and specs.
@typing.no_type_check
@struct.dataclass
class LoadWindow:
    """Sums of the loads of several steps; usable on the host and on devices."""

    num_steps: Float[Array, ""]
    load_sum: Float[Array, "*L E"]
    violation_sum: Float[Array, "*L"]
    violation_sup: Float[Array, "*L"]

    @classmethod
    def empty(cls, load: Float[Array, "*L E"]) -> LoadWindow:
        """Return a window without steps, for loads of this shape."""
        zero = jnp.zeros(load.shape[:-1], jnp.float32)
        return cls(
            num_steps=jnp.zeros((), jnp.float32),
            load_sum=jnp.zeros(load.shape, jnp.float32),
            violation_sum=zero,
            violation_sup=zero,
        )

    def add(self, load: Float[Array, "*L E"]) -> LoadWindow:
        """Return the window with one more step.

        Args:
            load: Share of each expert, `StepMetrics.load`; steps have equal weight.
        """
        violation = _violation(load)
        return LoadWindow(
            num_steps=self.num_steps + 1.0,
            load_sum=self.load_sum + load,
            violation_sum=self.violation_sum + violation,
            violation_sup=jnp.maximum(self.violation_sup, violation),
        )

    def summarise(self) -> dict[str, Float[Array, "*L"]]:
        """Return per layer the max violation of the summed load, and its mean and largest by
        step."""
        return {
            "max_violation_window": _violation(self.load_sum),
            "max_violation_mean": self.violation_sum / self.num_steps,
            "max_violation_sup": self.violation_sup,
        }


def _violation(load: Float[Array, "*L E"]) -> Float[Array, "*L"]:
    """Return the largest over the mean, minus 1; 0 where all are 0."""
    mean = load.mean(-1)
    is_routed = mean > 0.0
    return jnp.where(is_routed, load.max(-1) / jnp.where(is_routed, mean, 1.0) - 1.0, 0.0)


def _leaves_named(tree: Any, *names: str) -> list[Array]:
    """Return the leaves whose path ends in these names."""
    return [
        leaf
        for path, leaf in jax.tree.leaves_with_path(tree)
        if tuple(getattr(key, "key", None) for key in path[-len(names) :]) == names
    ]
