# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Where tokens, routing and experts of a MoE layer lie: the mesh axes of its island.

The residual stream is cut by sequences and by positions. A router takes it as it is, and looks
beyond its device through the axes of `RouterInputs.extent`. Two kinds cannot:

    capacity   looks at whole sequences: these are gathered, every device of `own_axes` routes all
               their tokens alike, and then goes on with its own positions
    soft_moe   mixes whole sequences: these are gathered, and the experts too must be where they are

Experts are whole on every device, or spread as the dispatcher has it.
"""

from __future__ import annotations

import dataclasses

import jax

from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.config import MoEConfig
from jaxmoe.routing import SoftMoEConfig
from sharding import axes as ax
from sharding.expert_parallel import ExpertAxes


@dataclasses.dataclass(frozen=True, slots=True)
class MoELayout:
    """Mesh axes of the island; none outside an Explicit mesh."""

    sequence_axes: tuple[str, ...]
    """Over which the positions that the router is given are spread."""
    own_axes: tuple[str, ...]
    """Over which positions are spread behind a router that was given whole sequences."""
    experts: ExpertAxes
    """None: every device has all experts."""

    @property
    def is_spread(self) -> bool:
        """Whether the island's results are spread over positions."""
        return bool(self.sequence_axes or self.own_axes)


def moe_layout(moe: MoEConfig, execution: ExecutionConfig) -> MoELayout:
    """The layout on the current mesh.

    Args:
        moe: whose router and capacity decide what must be whole.
        execution: whose dispatcher decides where experts lie.

    Raises:
        ValueError: soft_moe with experts spread and sequences cut.
    """
    placement = execution.placement
    positions = placement.mesh_axes(ax.ACT_SEQ)
    experts = ExpertAxes()
    if execution.dispatcher.spreads_experts:
        experts = ExpertAxes(
            expert=placement.mesh_axes(ax.EXPERTS), expert_tensor=placement.mesh_axes(ax.EXPERT_MLP)
        )
    if not isinstance(moe.router, SoftMoEConfig):
        if moe.capacity is not None:
            return MoELayout((), positions, experts)
        return MoELayout(positions, (), experts)
    sizes = jax.sharding.get_abstract_mesh().shape
    if cut := [axis for axis in positions if sizes[axis] > 1 and experts.all]:
        raise ValueError(
            "model.moe.router 'soft_moe' mixes whole sequences, and the mesh cuts them along"
            f" {', '.join(cut)}: set execution.dispatcher to local, or these axes to 1"
        )
    return MoELayout((), (), experts)
