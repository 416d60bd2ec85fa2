# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Prints the parameter table, sizes, FLOPs and memory of a recipe or model, without a device.

    jaxmoe describe [recipe] [--dotted.field value ...]
    jaxmoe describe --run.directory RUN [--execution.mesh.data 8 ...]
    jaxmoe describe --run.directory OLMoE-1B-7B-0924 [--execution.mesh.data 8 ...]

`--run.directory` describes a run, or the model of a Hugging Face directory, or of its name on the
hub, with the other flags; a recipe is for what has no run.

A second table compares the widths with the tiles of matrix units. With a mesh of known sizes (for
example --execution.mesh.data 8) a third table follows: for every parameter and mesh axis its layout
when stored, used, differentiated and updated, and the collectives between them.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Sequence
from typing import Literal

from experiments.cli import flags as cli
from experiments.cli.exit import run_command
from experiments.cli.model import RUN, value_of
from experiments.cli.output import write
from experiments.cli.tables import text_table
from experiments.recipes import DEFAULT, RECIPES
from jaxmoe.checkpoint.huggingface import open_huggingface
from jaxmoe.checkpoint.huggingface.hub import (
    is_hub_name,
    is_huggingface,
    model_directory,
)
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.flops import flops_per_token
from jaxmoe.parameters import ParameterSpec
from jaxmoe.planning.parameter_layouts import layouts_text
from jaxmoe.run.config import PretrainConfig
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.plan import RunPlan, describe_rates, make_plan
from jaxmoe.run.provenance.lineage import read_lineage
from jaxmoe.run.reporting.pipelines import pipeline_in_words
from jaxmoe.run.reporting.tile_sizes import broken_rules, sizes_rows
from jaxmoe.tracking.console import format_flops
from jaxmoe.training.pipeline import check_pipeline
from sharding.mesh import MeshConfig, named_sizes
from sharding.rules import LogicalAxisRules

_BYTES = {"float32": 4, "bfloat16": 2}


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit code."""
    prog = "jaxmoe describe"
    description = __doc__ or ""
    with cli.exit_on_bad_configuration():
        subject = _run_of(argv)
    if subject is not None:
        config = cli.parse_flags(subject.config, argv, prog, description)
        subject = _with_flags(subject, config)
    else:
        recipe, config = cli.parse(RECIPES, DEFAULT, argv, prog, description)
        with cli.exit_on_bad_configuration():
            subject = _subject(recipe, config)
    with cli.exit_on_bad_configuration():
        config = subject.config
        plan = make_plan(config)
        if -1 not in config.execution.mesh.sizes:
            for rules in config.execution.state_layout.rules:
                plan.table.check_divides(rules, _mesh_shape(plan))
        page = describe(subject, plan)
    write(page)
    return int(cli.ExitCode.DONE)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """What a page describes."""

    kind: Literal["recipe", "run", "model"]
    name: str
    config: PretrainConfig
    lineage: tuple[str, ...] = ()
    """How a run was extended, or which run it began from."""


def _run_of(argv: Sequence[str]) -> Subject | None:
    """Return the run of --run.directory, as it was trained; None where it holds none.

    Raises:
        ValueError: A recipe is named as well, or the directory holds neither a run nor a model.
    """
    path = value_of(RUN, argv)
    if path is None or is_hub_name(path) or is_huggingface(path):
        return None
    run = RunDirectory(path)
    config = run.load_config(PretrainConfig)
    if not argv[0].startswith("-") and ":" not in argv[0]:
        raise ValueError(
            f"recipe {argv[0]} and run.directory={path} both describe a run: leave one of them out"
        )
    lineage = tuple(map(str, read_lineage(run)))
    return Subject(kind="run", name=path, config=config, lineage=lineage)


def _with_flags(run: Subject, config: PretrainConfig) -> Subject:
    """Return a run with the config after all flags, which its name tells where they change it."""
    if dataclasses.replace(config, run=run.config.run) == run.config:
        return run
    return dataclasses.replace(run, name=f"{run.name}, with other flags", config=config)


def _subject(recipe: str, config: PretrainConfig) -> Subject:
    """Return the model of --run.directory with the flags; the recipe with them without one."""
    if config.run.directory is None:
        return Subject(kind="recipe", name=recipe, config=config)
    path = model_directory(config.run.directory, "run.directory")
    if config.model != RECIPES[recipe]().model:
        raise ValueError(
            f"run.directory={path} brings a model, and --model flags change another: leave them out"
        )
    model, _ = open_huggingface(path)
    config = dataclasses.replace(config, model=model)
    return Subject(kind="model", name=pathlib.Path(path).resolve().name, config=config)


def _moment_bytes(plan: RunPlan, row: ParameterSpec) -> int:
    """Return the bytes of optimiser state per value of a parameter; moments are float32."""
    traits = plan.config.optimizer.traits(row.hyper.group)
    return traits.moments_per_parameter * _BYTES["float32"]


def describe(subject: Subject, plan: RunPlan) -> str:
    """Return the whole page.

    Args:
        subject: What to describe.
        plan: Model and parameter table.
    """
    config = plan.config
    model = plan.model
    table = plan.table
    training = config.training
    moe = model.moe
    active = table.active(*(moe.top_k, moe.num_experts) if moe else (0, 0))
    flops = flops_per_token(model, table, training.sequence_length)
    tokens = training.batch_size * training.sequence_length
    width = _BYTES[config.execution.precision.parameters]
    layout = config.execution.state_layout
    shards = _shards(plan, layout.parameters)
    moment_shards = _shards(plan, layout.optimizer)
    held_bytes = sum(row.size * width / shards[row.path] for row in table)
    moments = sum(row.size * _moment_bytes(plan, row) / moment_shards[row.path] for row in table)
    gradients = sum(row.size * width / shards[row.path] for row in table)
    mesh = " ".join(
        f"{axis}={'all remaining devices' if size == -1 else size}"
        for axis, size in config.execution.mesh.by_axis.items()
        if size != 1
    )
    lines = (
        f"{subject.kind:<20} {subject.name}",
        *(f"lineage              {event}" for event in subject.lineage),
        f"parameters           {table.total:,} total, {active:,} active",
        f"FLOPs                {format_flops(flops)} per token, {format_flops(flops * tokens)} per"
        f" step of {tokens} tokens, {format_flops(flops * training.tokens)} in"
        f" {training.steps} steps",
        f"learning rate        {describe_rates(plan) or f'{config.optimizer.learning_rate:g}'}",
        f"mesh                 {mesh or 'one device'}, rules {config.execution.rules}",
        *_stages(plan),
        f"memory per device    {_state_text(config.execution, held_bytes, moments)},"
        f" {_size(gradients)}"
        " gradients; activations not counted"
        + ("; on one device" if -1 in config.execution.mesh.sizes else ""),
        "",
        table.text(),
    )
    lines = (*lines, *_tiles(plan))
    if -1 not in config.execution.mesh.sizes and max(_mesh_shape(plan).values()) > 1:
        lines = (*lines, "", layouts_text(table, config.execution, _mesh_shape(plan), width))
    return "\n".join(lines)


def _state_text(execution: ExecutionConfig, parameters: float, moments: float) -> str:
    """Return where parameters and moments lie, by their bytes for one device."""
    match execution.optimizer_memory:
        case "device":
            return f"{_size(parameters + moments)} parameters and optimizer"
        case "host":
            return f"{_size(parameters)} parameters; optimizer {_size(moments)} in host memory"
        case _:
            return (
                f"{_size(parameters)} parameters; optimizer 0 in memory, {_size(moments)} in files"
                f" of {_size(2 * moments)}"
            )


def _tiles(plan: RunPlan) -> list[str]:
    """Return the table of products and tiles; on one device where the mesh is left open."""
    execution = plan.config.execution
    if -1 in execution.mesh.sizes:
        tile = {axis: max(size, 1) for axis, size in execution.mesh.by_axis.items()}
        execution = dataclasses.replace(execution, mesh=MeshConfig(**tile), fold=None)
    # Widths do not depend on the dtype, and "auto" would ask for a device.
    precision = dataclasses.replace(execution.precision, compute="bfloat16")
    step = plan.step_plan(dataclasses.replace(execution, precision=precision))
    head = "sizes: products of a device in tiles of 256 x 256 (experts: 128 rows)"
    return ["", head, text_table(sizes_rows(step)), *broken_rules(step)]


def _stages(plan: RunPlan) -> list[str]:
    """Return the line about the pipeline; none without stages or with their number left open."""
    execution = plan.config.execution
    training = plan.config.training
    arguments = plan.model, execution, training.accumulation
    if training.skipping is not None:
        training.skipping.check(plan.step_plan(execution))
    if execution.mesh.stage <= 1:
        return []
    check_pipeline(*arguments)
    paths = training.step_gradients.paths(training.accumulation)
    return [f"stages               {pipeline_in_words(*arguments, paths=paths)}"]


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


def _mesh_shape(plan: RunPlan) -> dict[str, int]:
    """Return the devices along each mesh axis; 1 where the size is left open."""
    execution = plan.config.execution
    names, sizes = named_sizes(execution.mesh, execution.mesh_fold)
    return {name: max(size, 1) for name, size in zip(names, sizes, strict=True)}


def _shards(plan: RunPlan, rules: LogicalAxisRules) -> dict[str, int]:
    """Return the parts into which these rules divide each parameter."""
    sizes = _mesh_shape(plan)
    return {
        row.path: math.prod(
            sizes[axis] for name in row.declaration.axes for axis in rules.mesh_axes(name)
        )
        for row in plan.table
    }


if __name__ == "__main__":
    run_command(main)
