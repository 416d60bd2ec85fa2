# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Decides over which mesh axes tokens, routing and experts of a MoE layer are spread.

The residual stream is cut by sequences and by positions. A router receives it as it is, and looks
beyond its device through the axes of `RouterInputs.extent`. Two kinds need whole sequences:

    a limit         sequences are gathered, every device of `own_axes` routes all their tokens
                    alike, and continues with its own positions
    mixes_tokens    sequences are gathered, and the experts must be on the same device (soft_moe)

Experts are whole on every device, or spread as the dispatcher does it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import jax

from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.feed_forwards.moe.config import MoEConfig, current_route, token_route
from sharding import axes as ax
from sharding.expert_parallel import ExpertAxes
from sharding.expert_parallel.routes import TokenRoute


@dataclasses.dataclass(frozen=True, slots=True)
class MoELayout:
    """Mesh axes of the region; empty outside an Explicit mesh."""

    sequence_axes: tuple[str, ...]
    """Mesh axes over which the positions that the router receives are spread."""
    own_axes: tuple[str, ...]
    """Mesh axes over which positions are spread after a router that received whole sequences."""
    experts: ExpertAxes
    """Mesh axes over which experts are spread; empty where every device has all experts."""
    route: TokenRoute | None
    """How tokens move between devices before they are dispatched; None: they stay."""
    gathers_width: bool
    """Whether the matrices of experts are gathered along the width of the model."""

    @property
    def is_spread(self) -> bool:
        """Whether the region's results are spread over positions."""
        return bool(self.sequence_axes or self.own_axes)


def moe_layout(moe: MoEConfig, execution: ExecutionConfig) -> MoELayout:
    """Return the layout on the current mesh.

    Args:
        moe: Router and capacity, which may need whole sequences.
        execution: Dispatcher, which spreads the experts.

    Raises:
        ValueError: A router that mixes tokens, with experts spread and sequences cut.
    """
    placement = execution.placement
    positions = placement.mesh_axes(ax.ACT_SEQ)
    experts = ExpertAxes()
    if execution.dispatcher.traits.spreads_experts:
        experts = ExpertAxes(
            expert=placement.mesh_axes(ax.EXPERTS), expert_tensor=placement.mesh_axes(ax.EXPERT_MLP)
        )
    mesh = jax.sharding.get_abstract_mesh().shape
    gathers_width = any(mesh[axis] > 1 for axis in placement.mesh_axes(ax.EXPERT_EMBED))
    if not moe.router.traits.mixes_tokens:
        received, expert_positions = ((), positions) if moe.keeps_order else (positions, ())
        return MoELayout(
            received, expert_positions, experts, current_route(execution), gathers_width
        )
    return MoELayout((), (), experts, current_route(execution), gathers_width)


def check_layout(
    moe: MoEConfig,
    execution: ExecutionConfig,
    *,
    sequences: int,
    length: int,
    mesh: Mapping[str, int],
) -> None:
    """Check, before anything is traced, the capacity and the dispatcher of a layer.

    Args:
        moe: Router, which may need whole sequences or assign by expert.
        execution: Dispatcher and layout rules.
        sequences: Sequences of a device in one pass.
        length: Tokens of a sequence.
        mesh: {axis or piece of one: size}.

    Raises:
        ValueError: Assignments that the chunks of the dispatcher cannot cut, or that cannot move;
            sequences too short for the capacity.
    """
    if moe.capacity is not None:
        moe.capacity.check_length(length, top_k=moe.top_k, num_experts=moe.num_experts)
    rules = execution.axis_rules
    dispatcher = execution.dispatcher

    def devices(*names: str) -> int:
        return math.prod(mesh.get(axis, 1) for name in names for axis in rules.mesh_axes(name))

    if not dispatcher.traits.spreads_experts:
        return
    if devices(ax.EXPERTS, ax.EXPERT_MLP) > 1:
        tokens = sequences * length // devices(ax.ACT_SEQ)
        is_token_major = moe.is_token_major
        places = devices(ax.EXPERTS)
        if (route := token_route(dispatcher)) is not None and places > 1:
            route.check_tokens(tokens, places, is_token_major=is_token_major)
        dispatcher.check_tokens(tokens, is_token_major=is_token_major)


def check_dispatcher(
    moe: MoEConfig | None,
    execution: ExecutionConfig,
    *,
    num_layers: int,
    vocab_size: int,
    sizes: Mapping[str, int],
) -> None:
    """Refuse a dispatcher that does not fit a model on a mesh.

    Args:
        moe: MoE layers of the model; None: it has none.
        execution: Dispatcher and rules.
        num_layers: MoE layers.
        vocab_size: V.
        sizes: Size of each mesh axis.

    Raises:
        ValueError: The tables by which it moves tokens are missing or those of another model or
            mesh.
    """
    route = token_route(execution.dispatcher)
    if moe is None or route is None:
        return
    axes = execution.axis_rules.mesh_axes(ax.EXPERTS)
    num_devices = math.prod(sizes.get(axis, 1) for axis in axes)
    route.check_model(
        num_devices=num_devices,
        num_layers=num_layers,
        num_experts=moe.num_experts,
        vocab_size=vocab_size,
    )
