# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Writes a table of every flag of every command, from the configs that the commands parse.

To add a command: a row in COMMANDS of .docs/flag_tables.py
"""

from __future__ import annotations

import collections
import dataclasses
import importlib
import inspect
import pathlib
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from indexes import first_line, index_page

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


INTRODUCTION = """\
A field of a config is `--dotted.field value`. A member of a union is `dotted.field:name` or
`--dotted.field name`; the fields of the member follow under the same path. `describe` and
`data inspect` take the flags of `pretrain`."""


def write(target: pathlib.Path) -> None:
    """Write one page per command, and an index of them.

    A table that an earlier page has is left out, with a link to that page.

    Args:
        target: Folder of the generated pages; created when it does not exist.
    """
    target.mkdir(parents=True, exist_ok=True)
    entries = {}
    origins: dict[str, str] = {}
    for command, where in COMMANDS.items():
        page = page_of(command)
        entries[page] = about(command, where)
        tables = list(_tables(_config_class(where)))
        new = [(title, text) for title, text in tables if origins.setdefault(text, page) == page]
        shared = collections.defaultdict(list)
        for title, text in tables:
            if origins[text] != page:
                shared[origins[text]].append(title)
        text = "\n".join([*_head(command), *(text for _, text in new), *_links(shared)])
        (target / f"{page}.md").write_text(text + "\n", encoding="utf-8")
    index = index_page("Flags", entries, INTRODUCTION)
    (target / "index.md").write_text(index, encoding="utf-8")


def whole_pages() -> dict[str, str]:
    """Return every flag of each command, by the name of its page."""
    return {
        page_of(command): "\n".join(text for _, text in _tables(_config_class(where)))
        for command, where in COMMANDS.items()
    }


def page_of(command: str) -> str:
    """Return the name of the page of a command."""
    return command.replace(" ", "_").replace("-", "")


def about(command: str, where: str) -> str:
    """Return what a command does, in one line.

    Args:
        command: Its name, with that of its part if it has several.
        where: Module and class of its config.
    """
    folder = pathlib.Path(importlib.import_module("experiments").__path__[0])
    own_file = folder / f"{command}.py"
    if not own_file.exists():
        own_file = folder / command / "__main__.py"
    if not own_file.exists():
        own_file = pathlib.Path(str(importlib.import_module(where.partition(":")[0]).__file__))
    return first_line(own_file)


def _config_class(where: str) -> type:
    module, _, name = where.partition(":")
    return getattr(importlib.import_module(module), name)


def _head(command: str) -> list[str]:
    return [f"# `{command}`", "", f"`jaxmoe {command}`", ""]


def _links(shared: Mapping[str, list[str]]) -> Iterator[str]:
    """Yield the links to the pages that have the other tables."""
    if shared:
        yield from ("## Flags of other pages", "")
    for page, titles in shared.items():
        yield f"As on the page of [{page}]({page}.md): " + ", ".join(f"`{t}`" for t in titles) + "."
        yield ""


def _tables(cls: type) -> Iterator[tuple[str, str]]:
    """Yield title and text of a table for the fields of a config, and of each config below it."""
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
        lines = []
        if path:
            summary = (inspect.getdoc(current) or "").split("\n\n")[0]
            lines += [f"## {choice}", "", _escaped(summary), ""]
        if rows:
            lines += ["| flag | default | meaning |", "| --- | --- | --- |", *rows, ""]
        if lines:
            yield choice or "the command itself", "\n".join(lines)


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
