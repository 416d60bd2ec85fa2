# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Reorders the experts of a training state by a placement.

    w'[l, i] = w[l, order[l, i]]      expert weights, router columns, moments, spheres, biases

The model computes the same function with its experts renumbered. Numbers are only moved, and the
inverse placement restores them bit for bit. What is equal to before:

    exactly            the choice of experts (where no two scores are equal), each expert's output,
                       and every gate that is computed from the chosen scores alone
    to rounding        sums over all E experts (a softmax over E, a balance loss, Newton-Schulz of
                       the router's matrix), whose terms are in another order
    in distribution    noise that a router or balancer draws by the number of an expert (noisy_topk,
                       coupling), in training

Dimensions of experts are those of the logical axes `experts` and `router_out`; the optimiser state
of a parameter has the parameter's path. Router state has no declarations: its dimensions of experts
are those that double with E. The gating residual of MoE++ has two, the first of which counts the
experts of the MoE layer before. Experts without computation are not moved: every device has them.

Routers that name experts by number (hash, uniform random, forced balance) are refused, and so is a
placement that splits a group of `router.groups`.

Sources: ExFlow (arXiv 2401.08383), Speculative MoE (arXiv 2503.04398). A new parameter is moved if
it declares those axes.
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
"""Order of the experts in each layer, by dimension of an array; None for other dimensions."""


def relocate(model: ModelConfig, state: TrainState, placement: ExpertPlacement) -> TrainState:
    """Return a training state with its experts in the order of a placement.

    Args:
        model: Model of the state.
        state: State whose arrays are fully addressable by this process.
        placement: Placement of all MoE layers.

    Returns:
        A state with the shardings of `state`. Arrays that do not move are shared with it, so that
        only one of the two may be donated.

    Raises:
        ValueError: The placement does not fit the model, or the router cannot be reordered.
    """
    moves = _moves(model, placement)
    return dataclasses.replace(
        state,
        params=relocate_params(model, state.params, placement),
        opt_state=_follow(state.opt_state, moves),
        router_state=relocate_router_state(model, state.router_state, placement),
    )


def relocate_params(model: ModelConfig, params: Any, placement: ExpertPlacement) -> Any:
    """Return parameters in the order of a placement.

    Args:
        model: Model of the parameters.
        params: Nested dict of arrays.
        placement: Placement of all MoE layers.

    Raises:
        ValueError: See `relocate`.
    """
    return _follow(params, _moves(model, placement))


def relocate_router_state(model: ModelConfig, router_state: Any, placement: ExpertPlacement) -> Any:
    """Return router state in the order of a placement.

    Args:
        model: Model of the state.
        router_state: State stacked over MoE layers.
        placement: Placement of all MoE layers.

    Raises:
        ValueError: See `relocate`.
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
    """Refuse a placement that does not fit a model.

    Raises:
        ValueError: There are no such MoE layers, or the router cannot be reordered.
    """
    moe = model.moe
    if moe is None or not model.num_moe_layers:
        raise ValueError("placement: the model has no MoE layer, and no expert to place")
    have = placement.device_of.shape
    model_shape = (model.num_moe_layers, moe.num_experts)
    if have != model_shape:
        raise ValueError(
            f"placement: it is of {have[0]} MoE layers of {have[1]} experts, and the model has"
            f" {model_shape[0]} of {model_shape[1]}: record the trace of this model"
        )
    router = moe.router
    if not router.traits.is_learned:
        raise ValueError(
            f"placement: the router {router.name} assigns tokens to expert numbers, which change"
            " when experts move: its experts cannot be placed"
        )
    groups = getattr(router, "groups", None)
    if groups is not None:
        size = moe.num_routed // groups.num_groups
        blocks = _with_free(placement.order, moe.num_routed).reshape(have[0], -1, size) // size
        if (blocks != blocks[:, :, :1]).any():
            layer = int(np.argmax((blocks != blocks[:, :, :1]).any((1, 2))))
            raise ValueError(
                f"placement: in layer {layer} it splits groups of model.moe.router.groups"
                f" ({groups.num_groups} groups of {size} neighbours): place whole groups, or train"
                " without a group limit"
            )


def _moves(model: ModelConfig, placement: ExpertPlacement) -> dict[tuple[str, ...], Orders]:
    """Return the orders of each parameter with experts, by path."""
    check_placement(model, placement)
    assert model.moe is not None
    order = _with_free(placement.order, model.moe.num_routed)
    # The gating residual of the first MoE layer is zero: any order serves.
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


def _orders(row: ParameterSpec, layer_order: np.ndarray, before: np.ndarray) -> Orders:
    """Return the orders of one parameter, stacked over the layers of its stack."""
    orders: list[np.ndarray | None] = []
    for axis, size in zip(row.declaration.axes, row.shape, strict=True):
        has_experts = axis in (ax.EXPERTS, ax.ROUTER_OUT)
        orders.append(layer_order[:, :size] if has_experts else None)
    if row.declaration.role == "router_residual":
        orders[1] = before
    return tuple(orders)


def _follow(tree: Any, moves: Mapping[tuple[str, ...], Orders]) -> Any:
    """Return parameters, or a tree with their paths such as moments, in another order."""

    def move(path: Any, leaf: Any) -> Any:
        names = tuple(str(getattr(key, "key", getattr(key, "name", ""))) for key in path)
        for start in range(len(names)):
            if names[start:] in moves:
                return _take(leaf, moves[names[start:]])
        return leaf

    return jax.tree_util.tree_map_with_path(move, tree)


def _take(leaf: Any, orders: Orders) -> Any:
    """Return an array in another order and the same sharding; dimensions of size 1 are skipped."""
    values = np.asarray(jax.device_get(leaf))
    for dim, order in enumerate(orders):
        if order is not None and values.shape[dim] != 1:
            index = np.expand_dims(order, [d for d in range(1, values.ndim) if d != dim])
            values = np.take_along_axis(values, index, axis=dim)
    return jax.device_put(values, leaf.sharding) if isinstance(leaf, jax.Array) else values


def _with_free(order: np.ndarray, num_routed: int) -> np.ndarray:
    """Return the order followed by the experts without computation."""
    layers, experts = order.shape
    free = np.tile(np.arange(experts, num_routed), (layers, 1))
    return np.concatenate([order, free], axis=1)
