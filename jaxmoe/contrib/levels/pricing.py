# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Cost of a micro-batch by level from the table of chips, and the packing of a run by level.

    pair    6 N (H + Hv) FLOPs of each layer without a window / tensor
    other   6 FLOPs per parameter that a token meets, and attention in windows, of C tokens
    ring    messages of a ring of d devices, forward and backward, of each attention layer

over the peak times the efficiency, or the bandwidth of a link in one direction: between hosts for
groups that do not fit the fast network. Recomputation counts a third more. Gathers of weights and
reductions of gradients are taken to be hidden; they are the same at every level.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

from jaxmoe import combinations
from jaxmoe.contrib.levels import LevelAssigner, LevelCost, LevelPacking, Room
from jaxmoe.contrib.levels.by_level import document_degrees
from jaxmoe.layers.context import heads_of
from jaxmoe.models.flops import matmul_parameters
from jaxmoe.planning.abstract_step import StepPlan
from jaxmoe.planning.hardware import Chip
from jaxmoe.planning.sizes import Sizes
from sharding.sequence_parallel import AttentionSizes, RingConfig
from sharding.sequence_parallel.traffic import sent_bytes

_RING = RingConfig()
_DIRECTIONS = (False, True)


def level_packing(plan: StepPlan, assigner: LevelAssigner, chip: Chip) -> LevelPacking:
    """Return the packing of the batches of a step by level.

    Args:
        plan: Step with its mesh.
        assigner: Choice of the level of each document.
        chip: Properties of each device.

    Raises:
        ValueError: The step cannot leave out micro-batches.
    """
    execution = plan.execution
    packing = SimpleNamespace(packing="levels")
    combinations.check(data=packing, execution=execution)
    room = level_room(plan)
    return LevelPacking(
        assigner=assigner,
        room=room,
        cost=level_cost(plan, room.degrees, chip),
        accumulation=plan.accumulation,
    )


def level_room(plan: StepPlan) -> Room:
    """Return the sizes of a micro-batch of a step."""
    ranks = plan.execution.mesh.seq
    return Room(
        tokens=plan.sequence_length // ranks,
        degrees=document_degrees(plan.execution.sequence_parallel, ranks),
        rows=plan.batch_size // plan.accumulation,
    )


def level_cost(plan: StepPlan, degrees: tuple[int, ...], chip: Chip) -> LevelCost:
    """Return the seconds of the parts of a micro-batch at each level.

    Args:
        plan: Step with its mesh.
        degrees: Devices of a group at each level.
        chip: Properties of each device.
    """
    sizes = Sizes.of(plan)
    model = plan.model
    remats = [plan.execution.remat_of(kind.feed_forward.is_routed) for kind in model.kinds]
    again = 1.0 + sum(remat in ("full", "offload") for remat in remats) / len(remats) / 3
    tensor = plan.execution.mesh.tensor
    second = chip.flops * chip.efficiency / again * tensor
    pair = 0.0
    windows = 0.0
    rings = [0.0] * len(degrees)
    for kind in model.kinds:
        heads = heads_of(kind.mixer)
        if heads is None:  # the same work per token at every level
            windows += kind.mixer.flops_per_token(plan.sequence_length)
            continue
        features = 6.0 * heads.num_heads * (heads.head_dim + heads.value_dim)
        widths = [width for width in (heads.window, heads.chunk) if width is not None]
        if widths:
            windows += features * min(widths)
        else:
            pair += features
        attention = sizes.attention(heads)
        for level, degree in enumerate(degrees):
            length = attention.length // attention.ranks * degree
            group = dataclasses.replace(attention, ranks=degree, length=length)
            rings[level] += _ring_seconds(group, chip)
    flops = 6.0 * matmul_parameters(model, plan.table) + windows
    reach = chip.domain or plan.execution.mesh.seq * tensor
    near = [level for level, degree in enumerate(degrees) if degree * tensor <= reach]
    return LevelCost(
        pair=pair * max(1.0, sizes.sequences) / second,
        other=flops * sizes.inner_tokens / second,
        rings=tuple(rings),
        near_level=max(near, default=0),
    )


def _ring_seconds(group: AttentionSizes, chip: Chip) -> float:
    """Return the seconds of the messages of a layer in a ring, forward and backward."""
    if group.ranks == 1:
        return 0.0
    is_far = chip.domain and group.ranks * group.tensor > chip.domain
    bandwidth = chip.far_bandwidth if is_far else chip.link_bandwidth
    bandwidth /= 2 if chip.torus else 1  # one link of an axis, one way round
    sent = sum(sent_bytes(_RING, group, is_backward=back) for back in _DIRECTIONS)
    messages = sum(_RING.num_messages(group, is_backward=back) for back in _DIRECTIONS)
    return messages * chip.link_latency + sent / bandwidth
