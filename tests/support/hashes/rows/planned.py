# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Rows of plans: numbers of the planning command, parameter tables, and placements of experts."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from tests.support.hashes.digests import digest_of_record, digest_of_tree
from tests.support.hashes.rows import Row, steps

PLANS = {
    "tiny_on_gpus": ("tiny", "--topology", "gpu:h100:8"),
    "tiny_on_tpus": ("tiny", "--topology", "tpu:v5e:2x2", "--execution.mesh.tensor", "2"),
    "olmoe_on_gpus": ("olmoe_1b_7b", "--topology", "gpu:h100:64"),
    "qwen3_on_tpus": ("qwen3_30b_a3b", "--topology", "tpu:v5p:4x4x4"),
    "sequences": (
        "tiny",
        "--topology",
        "gpu:h100:8",
        "--execution.mesh.seq",
        "8",
        "execution.sequence-parallel:auto",
    ),
    "stages": (
        "tiny",
        "--topology",
        "gpu:h100:8",
        "--execution.mesh.stage",
        "2",
        "--execution.mesh.data",
        "4",
        "--training.accumulation",
        "4",
        "--model.num_layers",
        "4",
        "--training.batch_size",
        "32",
    ),
}


def rows() -> Iterator[tuple[str, Row]]:
    """Yield the rows."""
    from experiments.recipes import RECIPES
    from jaxmoe.contrib.placement import PLACERS
    from jaxmoe.models.presets import PRESETS

    for name, flags in PLANS.items():
        yield f"plan/{name}", functools.partial(_plan, flags)
    for name in PRESETS:
        yield f"preset/{name}", functools.partial(_preset, name)
    for name in RECIPES:
        yield f"recipe/{name}", functools.partial(_recipe, name)
    for name in PLACERS:
        yield f"placer/{name}", functools.partial(_placer, name)


def _plan(flags: Sequence[str], directory: pathlib.Path) -> dict[str, str]:
    from experiments.plan import __main__ as plan

    code = plan.main([*flags, "--compiles", "0", "--run.directory", str(directory / "plan")])
    if code != 0:
        raise RuntimeError(f"plan ended with exit code {code}")
    summary = json.loads((directory / "plan" / "summary.json").read_text())
    return {
        "numbers": digest_of_record(_numbers(summary)),
        "flags": digest_of_record(summary["flags"]),
    }


def _numbers(value: Any) -> Any:
    """Leave the seconds of this call and the paths of this machine out."""
    if isinstance(value, dict):
        left_out = ("wall_seconds", "directory", "compile_seconds", "search_seconds")
        return {name: _numbers(child) for name, child in value.items() if name not in left_out}
    return [_numbers(child) for child in value] if isinstance(value, list) else value


def _preset(name: str, directory: pathlib.Path) -> dict[str, str]:
    from jaxmoe import parameter_table
    from jaxmoe.models.flops import flops_per_token
    from jaxmoe.models.presets import PRESETS

    model = PRESETS[name]()
    flops = {"flops": digest_of_record(flops_per_token(model, parameter_table(model), 4096))}
    return steps.parameter_rows(model) | flops


def _recipe(name: str, directory: pathlib.Path) -> dict[str, str]:
    """The table of the recipe's parameterisation, with its learning rates."""
    from experiments.recipes import RECIPES
    from jaxmoe.run.plan import make_plan

    plan = make_plan(RECIPES[name]())
    facts = [
        [row.path, row.shape, row.init_std, row.hyper.learning_rate_multiplier, row.hyper.group]
        for row in plan.table
    ]
    return {"table": digest_of_record(facts)}


def _placer(name: str, directory: pathlib.Path) -> dict[str, str]:
    from jaxmoe.contrib.placement import PLACERS
    from tests.support.traces import planted

    trace = planted(0, num_layers=3, num_experts=8, num_groups=4, num_tokens=256)
    member = steps.fitting(PLACERS[name], {"time_limit_s": 600.0})
    solution = member.solve(trace, num_devices=4)
    return {"placement": digest_of_tree(dataclasses.asdict(solution.placement))}
