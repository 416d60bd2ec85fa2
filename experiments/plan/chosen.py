# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Turns a plan that was chosen into the execution and the flags of a run.

To print another choice as a flag: `_choices` in `experiments/plan/chosen.py`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from experiments.plan.config import PlanConfig
from jaxmoe.configs import to_json
from jaxmoe.execution import ExecutionConfig
from jaxmoe.planning.hardware import Chip
from jaxmoe.planning.pipelines_compared import compare_schedules
from jaxmoe.planning.search import Candidate, SearchResult, mesh_flags
from jaxmoe.planning.search.verdicts import plan_in_words, why_not


def chosen_execution(config: PlanConfig, candidate: Candidate) -> ExecutionConfig:
    """Return the execution of a run that follows a plan.

    Args:
        config: Run to plan.
        candidate: Plan to follow.
    """
    execution_of_plan = candidate.plan.execution
    names = ("mesh", "fold", "rules", "dispatcher", "pipeline", "remat", "remat_dense")
    return dataclasses.replace(
        config.execution, **{name: getattr(execution_of_plan, name) for name in names}
    )


def flags_of(candidate: Candidate, config: PlanConfig, defaults: ExecutionConfig) -> list[str]:
    """Return the words that follow `pretrain RECIPE` on the command line of the run.

    Args:
        candidate: Plan to follow.
        config: Run to plan.
        defaults: Execution of the recipe, whose flags need not be given.
    """
    flags = [*mesh_flags(candidate.mesh), *_batch_flags(config, candidate)]
    return flags + _choices(chosen_execution(config, candidate), defaults)


def _choices(execution: ExecutionConfig, defaults: ExecutionConfig) -> list[str]:
    """Return the choices that are not the recipe's, as words of a command line."""
    arguments = [
        word
        for field in ("rules", "remat", "remat_dense")
        if getattr(execution, field) != getattr(defaults, field)
        for word in (f"--execution.{field}", str(getattr(execution, field)))
    ]
    if execution.fold is not None and execution.fold != defaults.fold:
        arguments.append("execution.fold:moemesh")
        arguments += [
            word
            for name in ("expert", "expert_tensor", "seq_inner")
            if (size := getattr(execution.fold, name)) > 1
            for word in (f"--execution.fold.{name}", str(size))
        ]
    arguments += [
        f"execution.{field}:{member.name}"
        for field, member, default in (
            ("dispatcher", execution.dispatcher, defaults.dispatcher),
            ("sequence_parallel", execution.sequence_parallel, defaults.sequence_parallel),
            ("pipeline", execution.pipeline_order, defaults.pipeline_order),
        )
        if type(member) is not type(default)
    ]
    dispatcher: Any = execution.dispatcher
    default: Any = defaults.dispatcher
    if type(dispatcher) is not type(default):
        default = type(dispatcher)()
    arguments += [
        word
        for field in dataclasses.fields(dispatcher)
        if (value := getattr(dispatcher, field.name)) != getattr(default, field.name)
        for word in (f"--execution.dispatcher.{field.name}", str(value))
    ]
    if (chunks := execution.pipeline_order.chunks) != defaults.pipeline_order.chunks:
        arguments += ["--execution.pipeline.chunks", str(chunks)]
    return arguments


def _batch_flags(config: PlanConfig, candidate: Candidate) -> list[str]:
    """Return the flags that make batches fit the mesh, where the config's do not."""
    flags = []
    shards = candidate.mesh.batch_shards
    if candidate.plan.accumulation != config.training.accumulation:
        flags += ["--training.accumulation", str(candidate.plan.accumulation)]
    if config.held_out_batch_size % shards:
        rows = -(-config.held_out_batch_size // shards) * shards
        flags += ["--evaluation.batch_size", str(rows)]
    return flags


def plan_summary(
    config: PlanConfig,
    search_result: SearchResult,
    compiled: dict[str, Any] | None,
    chip: Chip,
    defaults: ExecutionConfig,
) -> dict[str, Any]:
    """Return the figures of a plan for summary.json.

    Args:
        config: Run to plan.
        search_result: Result of the search; its first plan was chosen.
        compiled: Figures of the compiler; None in closed form.
        chip: Properties of each device.
        defaults: Execution of the recipe, whose flags need not be given.
    """
    candidate = search_result.fitting[0]
    execution = chosen_execution(config, candidate)
    memory = candidate.memory
    seconds = candidate.time
    return {
        "status": "done",
        "mesh": {axis: size for axis, size in candidate.mesh.by_axis.items() if size > 1},
        "accumulation": candidate.plan.accumulation,
        "flags": flags_of(candidate, config, defaults),
        "execution": to_json(execution),
        "memory": memory.categories(),
        "arguments": memory.arguments,
        "temporaries": memory.temporaries,
        "total": memory.total,
        "host": memory.host,
        "disk": memory.disk,
        "available": chip.available,
        "step_seconds": seconds.step,
        "step_seconds_overlapped": seconds.overlap_bound,
        "compute_seconds": seconds.compute,
        "memory_seconds": seconds.memory,
        "communication_seconds": seconds.communication,
        "hidden_seconds": seconds.hidden,
        "host_seconds": seconds.host,
        "disk_seconds": seconds.disk,
        "tokens_per_second": candidate.plan.tokens / seconds.step,
        "compiled": compiled,
        "schedules": _schedules(candidate, chip),
        "runners_up": [
            {
                "plan": plan_in_words(runner_up.plan),
                "step_seconds": runner_up.time.step,
                "total": runner_up.need,
                "why": why_not(candidate, runner_up),
            }
            for runner_up in search_result.fitting[1:]
        ],
    }


def _schedules(candidate: Candidate, chip: Chip) -> list[dict[str, Any]]:
    """Return the figures of the schedules that fit a mesh with stages; none without stages."""
    if candidate.mesh.stage == 1:
        return []
    return [
        dataclasses.asdict(schedule) | {"pipeline": to_json(schedule.pipeline)}
        for schedule in compare_schedules(candidate.plan, chip)
    ]
