# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Lists changes to a plan that save memory, for a plan that does not fit.

To suggest another change: `remedies` in `jaxmoe/planning/search/remedies.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxmoe.execution import ExecutionConfig, OffloadConfig
from jaxmoe.planning.abstract_step import StepPlan
from jaxmoe.planning.hardware import Chip
from jaxmoe.planning.memory import estimate_memory
from jaxmoe.planning.search.best_first import Candidate
from jaxmoe.planning.search.memory_policy import policy_fields
from jaxmoe.planning.search.meshes import divisors
from jaxmoe.planning.search.space import fewest_micro_batches
from jaxmoe.precision import PrecisionPolicy
from sharding.state_layouts import STATE_LAYOUTS


def remedies(candidate: Candidate, chip: Chip) -> dict[str, float]:
    """Return flags that need less memory, each with the bytes that a device would need.

    Args:
        candidate: Mesh that does not fit.
        chip: Properties of one device.
    """
    plan = candidate.plan
    execution = candidate.plan.execution
    changes: dict[str, StepPlan] = {}

    def execute(flag: str, **fields: object) -> None:
        changes[flag] = plan.on(dataclasses.replace(execution, **fields))

    if execution.remat in ("none", "dots"):
        execute("--execution.remat kernels", remat="kernels")
    if execution.remat in ("none", "dots", "kernels", "attention"):
        execute("--execution.remat full", remat="full")
    if chip.platform != "cpu" and execution.remat != "offload":
        execute("--execution.remat offload", remat="offload")
    if chip.platform != "cpu" and execution.optimizer_memory == "device":
        for parts in (1, 8) if plan.execution.mesh.stage == 1 else (1,):
            offload = OffloadConfig(parts=parts)
            execute(_text(execution, {"offload": offload}), offload=offload)
    if chip.platform != "cpu" and execution.parameter_memory == "device":
        flags: dict[str, object] = {"offload": OffloadConfig(parameters="host", parts=8)}
        flags |= {"remat": "full", "remat_dense": None, "telemetry": "brief"}
        if plan.execution.mesh.stage == 1 and STATE_LAYOUTS[execution.rules].is_streamable:
            execute(_text(execution, flags), **flags)
        fields = policy_fields(plan, chip, candidate.memory.total - chip.available)
        if fields:
            execute(_text(execution, fields), **fields)
    if not execution.loss_chunk and plan.sequence_length > 512:
        execute("--execution.loss_chunk 512", loss_chunk=512)
    if execution.rules != "fully_sharded":
        execute("--execution.rules fully_sharded", rules="fully_sharded")
    if execution.precision.parameters == "float32":
        narrow = PrecisionPolicy(parameters="bfloat16", compute=execution.precision.compute)
        execute("--execution.precision.parameters bfloat16", precision=narrow)
    most = plan.batch_size // candidate.mesh.batch_shards
    unit = fewest_micro_batches(execution)
    if more := [a for a in divisors(most) if a > plan.accumulation and a % unit == 0]:
        flag = f"--training.accumulation {more[-1]}"
        changes[flag] = dataclasses.replace(plan, accumulation=more[-1])
    needs = {
        flag: estimate_memory(changed, chip.platform).total for flag, changed in changes.items()
    }
    return {flag: need for flag, need in needs.items() if need < candidate.memory.total}


def _text(execution: ExecutionConfig, fields: Mapping[str, object]) -> str:
    """Return the flags of the fields that change."""
    changed = {name: value for name, value in fields.items() if getattr(execution, name) != value}
    return " ".join(flag for field in changed.items() for flag in _flag_words(*field))


def _flag_words(name: str, value: Any) -> list[str]:
    """Return the flags of a field; of a group those that differ from its defaults, or the first."""
    if not dataclasses.is_dataclass(value):
        return [f"--execution.{name} {value}"]
    fields = dataclasses.fields(value)
    changed = [field for field in fields if getattr(value, field.name) != field.default]
    below = [field.name for field in changed or fields[:1]]
    return [f"--execution.{name}.{field} {getattr(value, field)}" for field in below]
