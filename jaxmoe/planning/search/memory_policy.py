# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Chooses what of a step waits in host memory: the least transfer that frees enough of the device.

    state         on the device | moments on the host | moments, parameters and gradients
    activations   on the device | inputs of layers on the host

One choice of each group is a multiple-choice knapsack: the seconds that a choice moves bytes over
the link of its memory are its cost, the bytes that leave the device its value. JAX knows the memory
kinds `pinned_host` and `unpinned_host` and no CXL; the library uses `pinned_host`.

To add a choice: a line of `choices_of` in `jaxmoe/planning/search/memory_policy.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jaxmoe.execution import OffloadConfig
from jaxmoe.planning.abstract_step import StepPlan, abstract_state
from jaxmoe.planning.device_bytes import device_bytes
from jaxmoe.planning.hardware import Chip
from jaxmoe.planning.sizes import Sizes
from sharding.state_layouts import STATE_LAYOUTS

_PARTS = 8


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MemoryChoice:
    """Memory of one category."""

    freed: float = 0.0
    """Bytes that leave the device."""
    seconds: float = 0.0
    """Time of its transfers in a step, with nothing beside them."""
    fields: tuple[tuple[str, Any], ...] = ()
    """Fields of the execution that bring it about."""


def cheapest(
    groups: Sequence[Sequence[MemoryChoice]], needed: float
) -> tuple[MemoryChoice, ...] | None:
    """Return one choice of each group that together free enough in the least time.

    Args:
        groups: Choices of which one is taken.
        needed: Bytes to free.

    Returns:
        The choices, or None where all together free too little.
    """
    frontier: list[tuple[float, float, tuple[MemoryChoice, ...]]] = [(0.0, 0.0, ())]
    for choices in groups:
        sums = [
            (seconds + choice.seconds, freed + choice.freed, (*names, choice))
            for seconds, freed, names in frontier
            for choice in choices
        ]
        frontier = []
        most = -1.0
        # A sum that takes longer and frees no more is never part of the best.
        for entry in sorted(sums, key=lambda entry: (entry[0], -entry[1])):
            if entry[1] > most:
                frontier.append(entry)
                most = entry[1]
    enough = [entry for entry in frontier if entry[1] >= needed]
    return enough[0][2] if enough else None


def choices_of(plan: StepPlan, chip: Chip) -> list[list[MemoryChoice]]:
    """Return the choices that a plan has, those of state first.

    Args:
        plan: Step with its state on the device.
        chip: Properties of one device.
    """
    execution = plan.execution
    sizes = Sizes.of(plan)
    state = abstract_state(plan, plan.mesh)
    names = [scan.name for scan in plan.model.scans]

    def of(tree: Any) -> int:
        return device_bytes(jax.tree.leaves(tree), chip.platform)

    moments = of(state.opt_state)
    layers = of([state.params[name] for name in names])
    host = OffloadConfig(parts=_PARTS)
    share_kept = min(1.0, 3 / _PARTS)
    link = chip.host_bandwidth
    choices = [MemoryChoice()]
    if execution.mesh.stage == 1 and execution.optimizer_memory == "device":
        freed = (1 - share_kept) * moments
        moved = 2 * moments
        choices.append(MemoryChoice(freed=freed, seconds=moved / link, fields=(("offload", host),)))
        if STATE_LAYOUTS[execution.rules].is_streamable and execution.telemetry == "brief":
            # Forward and backward, and the update: parameters; written, norm and update: gradients.
            moved += (2 * plan.accumulation + 2 + 3 * plan.accumulation) * layers
            offload = dataclasses.replace(host, parameters="host")
            fields: dict[str, Any] = {"offload": offload, "remat_dense": None}
            fields |= {} if execution.remat == "offload" else {"remat": "full"}
            freed += (1 - share_kept) * 2 * layers
            choices.append(
                MemoryChoice(freed=freed, seconds=moved / link, fields=tuple(fields.items()))
            )
    inputs = [MemoryChoice()]
    if execution.remat == "full":
        calls = sum(stack.num_calls for stack in plan.model.stacks)
        stream = sizes.tokens * plan.model.embed_dim * sizes.itemsize * calls
        share_kept = stream * plan.model.residual.arrays
        moved = 2 * share_kept * plan.accumulation
        inputs.append(
            MemoryChoice(freed=share_kept, seconds=moved / link, fields=(("remat", "offload"),))
        )
    return [choices, inputs]


def policy_fields(plan: StepPlan, chip: Chip, needed: float) -> Mapping[str, Any] | None:
    """Return the fields of the execution that free enough of a device in the least time.

    Args:
        plan: Step with its state on the device.
        chip: Properties of one device.
        needed: Bytes to free.

    Returns:
        Fields by name, or None where host memory does not help enough.
    """
    choices = cheapest(choices_of(plan, chip), needed)
    if choices is None:
        return None
    return {field: value for choice in choices for field, value in choice.fields}
