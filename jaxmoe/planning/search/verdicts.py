# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Describes a plan in words, and says why it was not chosen.

To name another choice: `plan_in_words` in `jaxmoe/planning/search/verdicts.py`.
"""

from __future__ import annotations

from jaxmoe.planning.abstract_step import StepPlan
from jaxmoe.planning.pipelines_compared import schedule_in_words
from jaxmoe.planning.search.best_first import Candidate
from jaxmoe.planning.search.meshes import mesh_in_words


def plan_in_words(plan: StepPlan) -> str:
    """Return mesh, micro-batches and choices: `data=8 tensor=2, 4 micro-batches, zero2, full`.

    Args:
        plan: Step on its mesh.
    """
    execution = plan.execution
    number = plan.accumulation
    parts = [mesh_in_words(execution.mesh)]
    if execution.fold is not None:
        fold = execution.fold
        parts.append(f"experts over {fold.expert * fold.expert_tensor}")
    if number > 1:
        parts.append(f"{number} micro-batches")
    parts.append(execution.rules)
    if execution.dispatcher.traits.spreads_experts:
        dispatcher = execution.dispatcher
        again = "" if dispatcher.keeps_rows or dispatcher.traits.gathers_tokens else ", sent again"
        parts.append(dispatcher.name + again)
    if execution.mesh.stage > 1:
        parts.append(schedule_in_words(execution.pipeline_order))
    parts.append(f"remat {execution.remat}")
    if execution.remat_dense is not None:
        parts.append(f"{execution.remat_dense} in dense layers")
    return ", ".join(parts)


def why_not(best: Candidate, candidate: Candidate) -> str:
    """Return by how much a plan is slower, and the part of its step that adds most.

    Of plans that take the same time it is the memory.

    Args:
        best: Plan that was chosen.
        candidate: Plan that fits too.
    """
    parts = _parts(best)
    candidate_parts = _parts(candidate)
    added = {
        name: candidate_parts.get(name, 0.0) - parts.get(name, 0.0)
        for name in {*parts, *candidate_parts}
    }
    most = max(sorted(added), key=added.__getitem__)
    slower = candidate.time.step - best.time.step
    if slower <= 1e-6 * best.time.step:
        return f"as fast, {(candidate.need - best.need) / 1e6:.4g} MB more"
    return f"+{slower:.3g} s: {most} +{added[most]:.3g} s"


def _parts(candidate: Candidate) -> dict[str, float]:
    """Return the seconds of a step by part."""
    time = candidate.time
    bound = "compute" if time.compute >= time.memory else "memory"
    parts = {bound: max(time.compute, time.memory)} | time.communication
    return parts | ({"hidden": -time.hidden} if time.hidden else {})
