# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Applies a placement of experts: everything that has a dimension of experts, in another order.

    w'[l, i] = w[l, order[l, i]]      expert weights, router columns, moments, spheres, biases

so that the model is the same function with its experts renumbered. Nothing is computed: the numbers
are moved, and the inverse placement moves them back, bit for bit. What is the same and what is not:

    exactly        the choice of experts (where no two scores are equal), each expert's output, and
                   every gate that is computed from the chosen scores alone
    to rounding    sums over all E experts (a softmax over E, a balance loss, Newton-Schulz of the
                   router's matrix), whose terms now come in another order
    in law alone   noise that a router or balancer draws for experts by number (noisy_topk,
                   coupling), in training

What has a dimension of experts is read off the declarations: the logical axes `experts` and
`router_out` of a parameter, whose optimiser state lies under the parameter's path; and of router
state, which has no declarations, the dimensions that double with E. The gating residual of MoE++
has two, the first of which counts the experts of the MoE layer before. Experts without computation
stay where they are: every device has them.

Routers that name experts by number (hash, uniform random, forced balance) are another function of
them afterwards, and are refused; so is a placement that tears a group of `router.groups` apart.

Source: ExFlow (arXiv 2401.08383), Speculative MoE (arXiv 2503.04398). To let a new parameter
follow: declare its dimensions with those axes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from jaxmoe.models.config import ModelConfig
from jaxmoe.parameters import ParameterSpec
from jaxmoe.scaling.initialize import parameter_table
from jaxmoe.training.state import TrainState
from sharding import axes as ax
from sharding.expert_parallel.placement import ExpertPlacement

Orders = tuple[Int[np.ndarray, "L E"] | None, ...]
"""For each dimension of an array, the order of its experts in each layer; None: it has none."""


def relocate(model: ModelConfig, state: TrainState, placement: ExpertPlacement) -> TrainState:
    """A training state with its experts in the order of a placement.

    Args:
        model: of the state.
        state: wholly addressable by this process.
        placement: of all MoE layers.

    Returns:
        Arrays that lie where those of `state` do; what does not move is shared with it, so a
        training step may be given only one of the two.

    Raises:
        ValueError: the placement does not fit the model, or its router cannot follow one.
    """
    moves = _moves(model, placement)
    return dataclasses.replace(
        state,
        params=relocate_params(model, state.params, placement),
        opt_state=_follow(state.opt_state, moves),
        router_state=relocate_router_state(model, state.router_state, placement),
    )


def relocate_params(model: ModelConfig, params: Any, placement: ExpertPlacement) -> Any:
    """The parameters alone; see `relocate`.

    Args:
        model: of the parameters.
        params: nested dict.
        placement: of all MoE layers.

    Raises:
        ValueError: as for `relocate`.
    """
    return _follow(params, _moves(model, placement))


def relocate_router_state(model: ModelConfig, router_state: Any, placement: ExpertPlacement) -> Any:
    """The router state alone; see `relocate`.

    Args:
        model: of the state.
        router_state: stacked over MoE layers.
        placement: of all MoE layers.

    Raises:
        ValueError: as for `relocate`.
    """
    check_placement(model, placement)
    moe = model.moe
    assert moe is not None
    order = _with_free(placement.order, moe.num_routed)
    sizes = {"top_k": moe.top_k, "embed_dim": model.embed_dim}

    def shapes(num_experts: int) -> Any:
        router = moe.router.build(num_experts=num_experts, **sizes)
        return jax.eval_shape(lambda: router.init(jax.random.key(0))[1])

    def move(leaf: Any, once: Any, twice: Any) -> Any:
        counts_experts = [b == 2 * a for a, b in zip(once.shape, twice.shape, strict=True)]
        return _take(leaf, (None, *(order if counts else None for counts in counts_experts)))

    return jax.tree.map(move, router_state, shapes(moe.num_routed), shapes(2 * moe.num_routed))


def check_placement(model: ModelConfig, placement: ExpertPlacement) -> None:
    """Refuses a placement that a model cannot follow.

    Raises:
        ValueError: in words.
    """
    moe = model.moe
    if moe is None or not model.num_moe_layers:
        raise ValueError("placement: the model has no MoE layer, and no expert to place")
    have, wanted = placement.device_of.shape, (model.num_moe_layers, moe.num_experts)
    if have != wanted:
        raise ValueError(
            f"placement: it is of {have[0]} MoE layers of {have[1]} experts, and the model has"
            f" {wanted[0]} of {wanted[1]}: record the trace of this model"
        )
    router = moe.router
    if not router.traits.is_learned:
        raise ValueError(
            f"placement: the router {router.name} names experts by number, and would name others"
            " after they have moved: there is nothing to place by"
        )
    groups = getattr(router, "groups", None)
    if groups is not None:
        size = moe.num_routed // groups.num_groups
        blocks = _with_free(placement.order, moe.num_routed).reshape(have[0], -1, size) // size
        if (blocks != blocks[:, :, :1]).any():
            layer = int(np.argmax((blocks != blocks[:, :, :1]).any((1, 2))))
            raise ValueError(
                f"placement: in layer {layer} it tears groups of model.moe.router.groups apart"
                f" ({groups.num_groups} groups of {size} neighbours): place whole groups, or train"
                " without a group limit"
            )


def _moves(model: ModelConfig, placement: ExpertPlacement) -> dict[tuple[str, ...], Orders]:
    """By the path of each parameter that has experts: what moves along which dimension."""
    check_placement(model, placement)
    assert model.moe is not None
    order = _with_free(placement.order, model.moe.num_routed)
    # What the first MoE layer is handed by the layer before it is zero whatever the order.
    before = np.concatenate([np.arange(order.shape[1])[None], order[:-1]])
    moves = {}
    for stack in model.stacks:
        layers = list(stack.moe_layers)
        for row in parameter_table(model) if layers else ():
            if row.path.startswith(f"{stack.path}/"):
                orders = _orders(row, order[layers], before[layers])
                if any(one is not None for one in orders):
                    moves[tuple(row.path.split("/"))] = orders
    return moves


def _orders(row: ParameterSpec, own: np.ndarray, before: np.ndarray) -> Orders:
    """Return the orders of one parameter, stacked over the layers of its stack."""
    orders: list[np.ndarray | None] = []
    for axis, size in zip(row.declaration.axes, row.shape, strict=True):
        has_experts = axis in (ax.EXPERTS, ax.ROUTER_OUT)
        orders.append(own[:, :size] if has_experts else None)
    if row.declaration.role == "router_residual":
        orders[1] = before
    return tuple(orders)


def _follow(tree: Any, moves: Mapping[tuple[str, ...], Orders]) -> Any:
    """A tree whose leaves lie under the paths of parameters: parameters, or moments of them."""

    def move(path: Any, leaf: Any) -> Any:
        names = tuple(str(getattr(key, "key", getattr(key, "name", ""))) for key in path)
        for start in range(len(names)):
            if names[start:] in moves:
                return _take(leaf, moves[names[start:]])
        return leaf

    return jax.tree_util.tree_map_with_path(move, tree)


def _take(leaf: Any, orders: Orders) -> Any:
    """The array in another order, where it lay; a dimension of size 1 has nothing to reorder."""
    values = np.asarray(jax.device_get(leaf))
    for dim, order in enumerate(orders):
        if order is not None and values.shape[dim] != 1:
            index = np.expand_dims(order, [d for d in range(1, values.ndim) if d != dim])
            values = np.take_along_axis(values, index, axis=dim)
    return jax.device_put(values, leaf.sharding) if isinstance(leaf, jax.Array) else values


def _with_free(order: np.ndarray, num_routed: int) -> np.ndarray:
    """With the experts without computation, which stay the last."""
    layers, experts = order.shape
    free = np.tile(np.arange(experts, num_routed), (layers, 1))
    return np.concatenate([order, free], axis=1)
