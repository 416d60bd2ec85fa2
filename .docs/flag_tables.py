# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Writes a table of every flag of every command, from the configs that the commands parse.

To add a command: a row in COMMANDS of .docs/flag_tables.py
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pathlib
import typing
from collections.abc import Iterator
from typing import Any

from jaxmoe.configs import alternatives, config_classes, field_types, is_config, registry_name
from jaxmoe.field_docs import field_docs

COMMANDS = {
    "pretrain": "jaxmoe.run.config:PretrainConfig",
    "finetune": "jaxmoe.run.config:PretrainConfig",
    "rl": "jaxmoe.run.config:PretrainConfig",
    "evaluate": "experiments.evaluate:EvaluateConfig",
    "ensemble": "experiments.ensemble:EnsembleConfig",
    "generate": "experiments.generate:GenerateConfig",
    "serve": "experiments.serve:ServeConfig",
    "report": "experiments.report:ReportConfig",
    "depth": "experiments.depth:DepthConfig",
    "layer_paths": "experiments.layer_paths:LayerPathsConfig",
    "replay": "experiments.replay:ReplayConfig",
    "resize": "experiments.resize:ResizeConfig",
    "plan": "experiments.plan.config:PlanConfig",
    "place": "experiments.place:PlaceConfig",
    "levels": "experiments.levels:LevelsStudyConfig",
    "checkpoint verify": "experiments.checkpoint.verify:VerifyConfig",
    "checkpoint inspect": "experiments.checkpoint.inspect:InspectConfig",
    "checkpoint convert": "experiments.checkpoint.convert:ConvertConfig",
    "checkpoint reshard": "experiments.checkpoint.resharding:ReshardConfig",
    "evaluate_tasks": "experiments.evaluate_tasks.__main__:EvaluateTasksConfig",
    "doctor": "experiments.doctor.__main__:DoctorConfig",
    "doctor --links": "experiments.doctor.links:LinksConfig",
    "launch": "experiments.launch.__main__:LaunchConfig",
    "launch --supervise": "experiments.launch.config:SuperviseConfig",
    "launch --islands": "experiments.launch.sites:SitesConfig",
    "serving advise": "experiments.serving.advise:AdviseConfig",
    "serving caches": "experiments.serving.caches:CachesConfig",
    "serving load": "experiments.serving.load:LoadConfig",
    "serving simulate": "experiments.serving.simulate:SimulateConfig",
    "transfer": "experiments.studies.transfer.config:TransferConfig",
    "gates": "experiments.studies.gates.config:GatesConfig",
    "routers": "experiments.studies.routers.config:RoutersConfig",
    "outer": "experiments.studies.outer.config:OuterConfig",
    "precision": "experiments.studies.precision:PrecisionConfig",
    "bench step": "experiments.bench.step:StepBenchConfig",
    "bench kernels": "experiments.bench.kernels:KernelBenchConfig",
    "bench routers": "experiments.bench.routers:RouterBenchConfig",
    "bench serve": "experiments.bench.serve:ServeBenchConfig",
    "bench finetune": "experiments.bench.finetune:FinetuneBenchConfig",
    "bench chunks": "experiments.bench.chunks:ChunkBenchConfig",
    "bench compiled": "experiments.bench.compiled:CompiledBenchConfig",
    "bench growth": "experiments.bench.growth:GrowthBenchConfig",
    "bench idle": "experiments.bench.serving.idle:IdleBenchConfig",
}
"""The config class of each command; `describe` and `data` take the flags of `pretrain`."""


def write(target: pathlib.Path) -> None:
    """Write one page per command, and an index of them.

    Args:
        target: Folder of the generated pages; created when it does not exist.
    """
    target.mkdir(parents=True, exist_ok=True)
    names = []
    for command, where in COMMANDS.items():
        module, _, name = where.partition(":")
        cls = getattr(importlib.import_module(module), name)
        page = command.replace(" ", "_").replace("-", "")
        names.append(page)
        text = [f"# `{command}`", "", f"`python -m experiments.{command}`", ""]
        text += _tables(cls)
        (target / f"{page}.md").write_text("\n".join(text) + "\n", encoding="utf-8")
    lines = [
        "# Flags",
        "",
        "A field of a config is `--dotted.field value`. A member of a union is",
        "`dotted.field:name` or `--dotted.field name`; the fields of the member follow under the",
        "same path. `describe` and `data inspect` take the flags of `pretrain`.",
        "",
        "```{toctree}",
        ":maxdepth: 1",
        "",
        *names,
        "```",
        "",
    ]
    (target / "index.md").write_text("\n".join(lines), encoding="utf-8")


def _tables(cls: type) -> Iterator[str]:
    """Yield a table for the fields of a config, and one for each config below it."""
    queue: list[tuple[str, str, type]] = [("", "", cls)]
    while queue:
        path, choice, current = queue.pop(0)
        rows = []
        for name, hint in field_types(current).items():
            here = f"{path}.{name}" if path else name
            members = [m for m in _leaves(hint) if dataclasses.is_dataclass(m)]
            for member in members:
                key = registry_name(member)
                flags = str(key) if here == "parts" else here  # --snapshots.every adds the part
                title = f"{here}:{key}" if key and len(members) > 1 else here
                queue.append((flags, title, member))
            if len(members) != 1 or registry_name(members[0]) is not None:
                rows.append(_row(current, name, here, hint, members))
        if path:
            yield f"## {choice}"
            yield ""
            yield _escaped((inspect.getdoc(current) or "").split("\n\n")[0])
            yield ""
        if rows:
            yield from ("| flag | default | meaning |", "| --- | --- | --- |", *rows, "")


def _row(cls: type, name: str, path: str, hint: Any, members: list[Any]) -> str:
    """Return the row of one field."""
    names = [registry_name(member) for member in members]
    named = [key for key in names if key]
    flag = f"`--{path}`"
    if len(named) > 1:
        flag = f"`{path}:NAME`" + "".join(f" `{key}`" for key in named)
    field = next(field for field in dataclasses.fields(cls) if field.name == name)
    default = "" if field.default is dataclasses.MISSING else _spelled(field.default)
    return f"| {flag} | {default} | {_escaped(field_docs(cls).get(name, ''))} |"


def _leaves(hint: Any) -> Iterator[Any]:
    """Yield the classes in an annotation, inside unions and tuples."""
    for option in alternatives(hint):
        if typing.get_origin(option) is tuple:
            for item in typing.get_args(option):
                if item is not Ellipsis:
                    yield from _leaves(item)
        elif is_config(option):
            yield from config_classes(option).values()
        else:
            yield option


def _spelled(value: Any) -> str:
    if dataclasses.is_dataclass(value):
        return f"`{registry_name(type(value)) or type(value).__name__}`"
    if isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0]):
        return " ".join(_spelled(item) for item in value)
    return f"`{value!r}`".replace("|", "\\|")


def _escaped(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
