# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Formats the part of a plan about its pipeline: schedules compared, timetable, layout of weights.

To compare another schedule: `choices` in `jaxmoe/planning/pipelines_compared.py`.
"""

from __future__ import annotations

import shutil

from experiments.cli.tables import text_table
from experiments.plan.units import size_in_words
from jaxmoe.planning.critical_path import critical_seconds, stage_times, tick_seconds
from jaxmoe.planning.hardware import Chip
from jaxmoe.planning.pipelines_compared import (
    compare_layouts,
    compare_schedules,
    schedule_in_words,
    timetable,
)
from jaxmoe.planning.search import Candidate


def pipeline_part(candidate: Candidate, chip: Chip) -> str:
    """Return the schedules that fit the mesh, the timetable, and the cheaper layout of weights.

    Args:
        candidate: Mesh with stages.
        chip: Properties of each device.
    """
    plan = candidate.plan
    rows = [("schedule", "idle", "inputs kept", "memory", "over stage", "step, seconds")]
    for schedule in compare_schedules(plan, chip):
        mark = " (this plan)" if schedule.pipeline == plan.execution.pipeline_order else ""
        rows.append(
            (
                f"  {schedule_in_words(schedule.pipeline)}{mark}",
                f"{schedule.idle:.1%}",
                str(schedule.inputs),
                size_in_words(schedule.memory),
                size_in_words(schedule.sent),
                f"{schedule.seconds:.4g}",
            )
        )
    text = (
        f"{text_table(rows)}\nidle: share of a step in which a stage waits; inputs kept: most"
        " streams of a\nmicro-batch that wait on a stage for their backward pass"
    )
    if plan.execution.pipeline_order.chunks == 1 and plan.paths is None:
        times = stage_times(plan, chip)
        stages = plan.execution.mesh.stage
        ticks = tick_seconds(plan.execution.pipeline_order, stages, plan.accumulation, times)
        critical = critical_seconds(stages, plan.accumulation, times)
        text += (
            f"\nlayers and sends     {ticks:.4g} s in ticks, {critical:.4g} s on the critical path"
            " of 1F1B"
        )
    if drawn := timetable(plan, width=shutil.get_terminal_size((100, 24)).columns):
        text += f"\n\n{drawn}"
    traffic = compare_layouts(plan, chip)
    if traffic is not None and traffic.once < traffic.always:
        verdict = "fits" if traffic.memory <= chip.available else "does not fit"
        text += (
            f"\n\nweights              {plan.execution.rules} gathers them in every tick and sends"
            f" {size_in_words(traffic.always)};\n                     --execution.rules zero2"
            f" gathers"
            f" them once a step and sends {size_in_words(traffic.once)},\n                    "
            f" with {size_in_words(traffic.memory)} of memory, which {verdict}"
        )
    return text
