# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Balances the experts of a step: losses over its micro-batches, and new router state.

A loss of the global batch is a function l(S) of statistics S summed over all its tokens. With
accumulation, micro-batch i has only its own S_i. Two forms:

    buffer     l of S_i with the counts of micro-batches 1 to i, averaged over micro-batches. The
               first ones see less of the batch than the last.
    two_pass   a pass without gradient computes S = sum_i S_i; then each micro-batch adds the
               gradient of <dl/dS (S), S_i>. Their sum is dl(S)/dw exactly, for every loss of the
               statistics: the gradient of one large batch, for one more forward pass.

Losses whose scope is the micro-batch or the sequence are averaged over micro-batches in `buffer`;
`two_pass` is exact for those of sequences as well.

Source of `buffer`: arXiv 2501.11873, algorithm 1.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.models.config import ModelConfig
from jaxmoe.routing import RouterStatistics
from jaxmoe.routing.balancers import StatisticsBalancer, of_statistics, statistics_losses
from jaxmoe.training.state import TrainState

AccumulatedBalance = Literal["buffer", "two_pass"]

Losses = dict[str, Float[Array, ""]]


def takes_two_passes(model: ModelConfig, form: AccumulatedBalance) -> bool:
    """Return whether a step needs the statistics of the whole batch before its gradients.

    Args:
        model: Model with the balancers.
        form: `two_pass`, where the loss of some balancer spans more than a micro-batch.
    """
    wide = any(balancer.traits.scope != "micro_batch" for balancer in _balancers(model))
    return form == "two_pass" and wide and model.num_moe_layers > 0


def buffered_losses(
    model: ModelConfig, statistics: RouterStatistics, before: RouterStatistics | None
) -> Losses:
    """Return the losses of one micro-batch with the counts of those before it (`buffer`).

    Args:
        model: Model with the balancers.
        statistics: Statistics of this micro-batch, differentiable.
        before: Sum over the previous micro-batches; None for the first.
    """
    if model.moe is None:
        return {}
    wide = None
    if before is not None:
        wide = dataclasses.replace(statistics, counts=statistics.counts + before.counts)
    moe = model.moe
    return statistics_losses(moe.balancers, statistics, wide, num_free=moe.num_zero_computation)


def linearized_losses(
    model: ModelConfig,
    statistics: RouterStatistics,
    batch_statistics: RouterStatistics,
    share: float | Float[Array, ""],
) -> Losses:
    """Return a share of the whole batch's losses with this micro-batch's gradient (`two_pass`).

    Args:
        model: Model with the balancers.
        statistics: Statistics of this micro-batch, differentiable.
        batch_statistics: Statistics of the whole batch.
        share: Share of this micro-batch in the value, and in losses of micro-batches.
    """
    losses = {}
    for balancer in _balancers(model):
        if balancer.traits.scope == "micro_batch":
            losses[balancer.name] = share * _loss(model, balancer, statistics)
            continue
        # Whole numbers among them, such as histograms, have no slope.
        value_and_slope = jax.value_and_grad(
            lambda s, b=balancer: _loss(model, b, s), allow_int=True
        )
        value, slope = value_and_slope(batch_statistics)
        pairs = zip(jax.tree.leaves(slope), jax.tree.leaves(statistics), strict=True)
        along = sum(jnp.sum(g * s) for g, s in pairs if g.dtype != jax.dtypes.float0)
        losses[balancer.name] = share * value + along - jax.lax.stop_gradient(along)
    return losses


def update_routers(
    model: ModelConfig, state: TrainState, statistics: RouterStatistics | None
) -> Any:
    """Return the router state of every MoE layer after a step.

    Routers without state, the default, have nothing to update: the state is returned as it is, as
    for a model without MoE layers.

    Args:
        model: Model with the routers.
        state: State before the step.
        statistics: Statistics of the whole batch; None without MoE layers.
    """
    if model.moe is None or statistics is None or not jax.tree.leaves(state.router_state):
        return state.router_state
    router = model.moe.build_router(model.embed_dim)
    return jax.vmap(router.update, in_axes=(0, 0, None))(state.router_state, statistics, state.step)


def _balancers(model: ModelConfig) -> tuple[StatisticsBalancer, ...]:
    return () if model.moe is None else of_statistics(model.moe.balancers)


def _loss(
    model: ModelConfig, balancer: StatisticsBalancer, statistics: RouterStatistics
) -> Float[Array, ""]:
    assert model.moe is not None  # it has balancers
    return balancer.loss(statistics, num_free=model.moe.num_zero_computation)
