# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Logs the header of a run before its first step."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from jaxmoe.layers.sequences import choose_form
from jaxmoe.messages import say
from jaxmoe.models.config import ModelConfig
from jaxmoe.routing.composition import advice, causal_advice
from jaxmoe.run.assemble import Assembly, describe_mesh, entropy_floor
from jaxmoe.run.config import InitialConfig
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.parts import RunPart
from jaxmoe.run.plan import RunPlan, describe_rates, describe_update
from jaxmoe.run.provenance.lineage import read_lineage
from jaxmoe.run.reporting.pipelines import pipeline_in_words
from jaxmoe.run.restore import StartingPoint
from jaxmoe.tracking.console import format_count, format_flops

_FEW_TOKENS = 1024
"""Tokens of a micro-batch on a device below which their cost is said."""


def print_header(
    name: str,
    directory: RunDirectory,
    start: StartingPoint,
    parts: Sequence[RunPart],
) -> None:
    """Log devices, model, data and plan of a run, before the first step.

    Args:
        name: Name of the run.
        directory: Run directory.
        start: State with which it begins.
        parts: Parts of the run.
    """
    assembly = start.assembly
    first_step = start.step
    plan = assembly.plan
    training = assembly.plan.config.training
    model = plan.model
    moe = plan.model.moe
    active = plan.table.active(*(moe.top_k, moe.num_experts) if moe else (0, 0))
    tokens = training.batch_size * training.sequence_length
    resumed = f"continuing after step {first_step}" if first_step else "new run"
    command = "finetune" if plan.has_base else "pretrain"
    lines = (
        f"jaxmoe {command}  {name}  {directory.path}  ({resumed})",
        f"devices  {_mesh_text(assembly)}",
        f"model    {model.num_layers} layers, width {model.embed_dim}, {experts_in_words(model)};"
        f" {format_count(plan.table.total)} parameters, {format_count(active)} active",
        f"data     {_data_text(assembly)}",
        f"plan     {training.steps} steps of {tokens} tokens,"
        f" {format_flops(plan.flops_per_token * tokens)} a step",
    )
    say("\n".join(lines))
    if jax.process_index() == 0:
        for event in read_lineage(directory):
            say(f"lineage  {event}")
    if assembly.execution.mesh.seq > 1:
        say(f"seq      {sequence_form(assembly)}")
    if (repacking := assembly.loader.repacking) is not None:
        say(f"levels   {repacking.describe(assembly.loader.step_rows(first_step))}")
    if assembly.execution.mesh.stage > 1:
        paths = training.step_gradients.paths(training.accumulation)
        arguments = model, assembly.execution, training.accumulation
        say(f"stages   {pipeline_in_words(*arguments, paths=paths)}")
    if training.skipping is not None:
        arguments = assembly.execution, training.accumulation
        say(f"skipping {training.skipping.describe(*arguments)}")
    for part in parts:
        for line in part.heading(assembly):
            say(line)
    if model.adapter is not None:
        say("\n".join(_adapter_lines(plan)))
    if update := describe_update(plan):
        say(f"update   {update}")
    if rates := describe_rates(plan):
        say(f"rates    {rates}; lr= below is that of the hidden matrices")
    if training.batch_ramp is not None:
        sizes = training.batch_sizes
        small = ", ".join(map(str, sizes.sizes[:-1]))
        say(f"ramp     batches of {small} sequences before step {sizes.stages[-1][0] + 1}")
    notes = advice(moe) if moe and model.num_moe_layers else []
    if moe and model.num_moe_layers and model.attention.is_causal:
        notes += causal_advice(moe)
    if model.adapter is not None and (note := model.adapter.note_on(training.steps)) is not None:
        notes.append(note)
    if (cost := training.gradients.describe(assembly.step())) is not None:
        notes.append(cost)
    mesh = assembly.execution.mesh
    number = assembly.micro_batches(training.batch_size)
    if (few := few_rows_in_words(tokens // (mesh.batch_shards * mesh.seq), number)) is not None:
        notes.append(few)
    for text in notes:
        say(f"note     {text}")
    if start.origin is not None:
        say(f"restored {start.origin}")


def few_rows_in_words(tokens: int, number: int) -> str | None:
    """Return what micro-batches of few tokens cost; None where there is one, or they have many.

    Args:
        tokens: Tokens of a step on a device.
        number: Micro-batches of the step.
    """
    each = tokens // number
    if number == 1 or each >= _FEW_TOKENS:
        return None
    return (
        f"{number} micro-batches of {each} tokens on a device: products of so few rows run below"
        " their rate (256 in place of 2,048: 41% more time for the demo's model on a CPU);"
        " --training.accumulation 1 where a whole batch fits"
    )


def experts_in_words(model: ModelConfig) -> str:
    """Return how many experts the layers have, and how many layers where not all have some."""
    moe = model.moe
    number = model.num_moe_layers
    if moe is None:
        return "dense"
    if not number:
        return "no experts (no layer has those of model.moe)"
    where = "" if number == model.num_layers else f" in {number} of them"
    return f"{moe.num_experts} experts, top-{moe.top_k}{where}"


def sequence_form(assembly: Assembly) -> str:
    """Return how attention spreads the positions of a sequence and, if chosen, why."""
    plan = assembly.plan
    length = assembly.plan.config.training.sequence_length
    mesh = dict(assembly.mesh.shape)
    return choose_form(plan.model.context, assembly.execution, length, mesh).reason


def _adapter_lines(plan: RunPlan) -> list[str]:
    """Return what is trained, and of which model."""
    adapter = plan.model.adapter
    table = plan.table
    assert adapter is not None  # asked for only then
    sizes = [row.size for row in table.trained_rows]
    frozen = sum(row.size for row in table if row.is_frozen)
    width = plan.config.execution.precision.parameter_dtype.itemsize
    initial = plan.config.checkpoint.initial or InitialConfig()
    step = "" if initial.step is None else f" step {initial.step}"
    base = f"base     {initial.path}{step}, {format_count(frozen)} parameters frozen"
    counts = (
        f"adapter  {adapter.words}: {len(sizes)} arrays, {format_count(sum(sizes))} parameters"
        f" trained, {sum(sizes) * width / 1e6:.2f} MB, {sum(sizes) / table.total:.1%} of all"
    )
    return [base, counts] if plan.has_base else [counts]


def _data_text(assembly: Assembly) -> str:
    """Return the data as text, with the loss floor of the objective if it differs."""
    training = assembly.plan.config.training
    floor = entropy_floor(assembly)
    text = assembly.source.describe(training.sequence_length)
    note = training.objective.floor_note
    return text if floor is None or note is None else f"{text}; {floor:.4f} {note}"


def _mesh_text(assembly: Assembly) -> str:
    mesh = describe_mesh(assembly.mesh)
    platform = assembly.mesh.devices.flat[0].platform
    return f"{assembly.mesh.size} x {platform}, mesh " + " ".join(
        f"{a}={n}" for a, n in mesh.items()
    )
