# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Replaces the assumed efficiency of a chip by that of a measured step (Pipette, DATE 2024).

    efficiency = executed FLOPs / devices / (peak * compute)
    compute    = seconds - predicted communication, and what `Chip.overlap` hides of it

To measure another property: a function from a plan and a time to a `Chip`, here.
"""

from __future__ import annotations

import dataclasses
import math

from jaxmoe.planning.abstract_step import StepPlan
from jaxmoe.planning.hardware import Chip
from jaxmoe.planning.sizes import Sizes
from jaxmoe.planning.step_time import executed_flops, predict_time


def measured_chip(chip: Chip, plan: StepPlan, seconds: float) -> Chip:
    """Return the chip with the efficiency that a step had.

    Args:
        chip: Properties of each device of the measured run.
        plan: Step that was measured, on its mesh.
        seconds: Time of the step.

    Raises:
        ValueError: The time is not possible on this chip.
    """
    sizes = Sizes.of(plan)
    open_ended = predict_time(plan, dataclasses.replace(chip, overlap=math.inf))
    communicated = open_ended.all_communication
    hideable = open_ended.hidden
    least = executed_flops(sizes) / math.prod(sizes.mesh.values()) / chip.flops
    # The inverse of `StepTime.step`: compute - min(hideable, overlap * compute) = left.
    computing = seconds - communicated
    compute = computing + hideable
    if chip.overlap < 1.0:
        compute = min(compute, computing / (1.0 - chip.overlap))
    if compute < least:
        raise ValueError(
            f"measured_run: a step of {seconds:.4g} s is shorter than the {least:.4g} s of its"
            f" products at the peak and {communicated:.4g} s of predicted communication: was the"
            " run on other devices than topology?"
        )
    return dataclasses.replace(chip, efficiency=least / compute)
