# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Compares runs on one HTML page: curves, final numbers, loss at equal cost, config, loads."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import pkgutil
from collections.abc import Mapping, Sequence
from typing import Any

from jaxmoe.catalog.run_parts import COMPARED
from jaxmoe.configs import varying_fields
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.reporting.recorded import RecordedRun
from jaxmoe.tracking.comparison import ComparedRun, at_equal_cost, write_comparison
from jaxmoe.tracking.history import read_router_load


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Page that compares runs."""

    report_file: pathlib.Path
    notes: tuple[str, ...]
    """Remarks for the reader, such as a run that has not ended."""


def compare_runs(runs: Sequence[RecordedRun], directory: str | None = None) -> Comparison:
    """Write report.html and summary.json about several runs.

    Args:
        runs: Files of each run.
        directory: Directory of the two files; runs/report/<names> when None.

    Raises:
        ValueError: A run is given twice, or the directory holds a run or cannot be written.
    """
    paths = [str(run.directory.path) for run in runs]
    names = shortest_names(paths)
    default = "_".join(name.replace(os.sep, "-") for name in names)[:80]
    target = RunDirectory(directory or f"runs/report/{default}")
    target.check_free_of_runs()
    notes = [note for run in runs for note in run.notes]
    compared = []
    for name, run in zip(names, runs, strict=True):
        flops = run.flops_per_token
        if flops is None:
            notes.append(f"{name}: its config is of another version, FLOPs are not known")
        load = None
        if run.directory.router_file.exists():
            _, loads = read_router_load(run.directory.router_file)
            load = loads[-1] if len(loads) else None
        compared.append(
            ComparedRun(
                name=name,
                summary={**run.summary, "model_flops_per_token": flops},
                series=run.series,
                load=load,
                flops_per_token=flops,
                bytes_per_token=run.bytes_per_token,
            )
        )
    differing = varying_fields([_without_run(run.config) for run in runs])
    with target.held(), target.usable():
        write_comparison(
            target.report_file,
            title=" against ".join(names) if len(names) < 4 else f"{len(names)} runs",
            runs=compared,
            differing=differing,
            more_sections=_compared_records(dict(zip(names, runs, strict=True))),
            notes=notes,
        )
        budgets = {axis: at_equal_cost(compared, axis) for axis in ("tokens", "FLOPs", "time")}
        target.write_summary(
            {
                "status": "done",
                "runs": {
                    name: {"directory": path, **run.summary}
                    for name, path, run in zip(names, paths, compared, strict=True)
                },
                "differing_fields": differing,
                "training_bits_at_equal": {
                    axis: {"budget": budget, **dict(zip(names, losses, strict=True))}
                    for axis, (budget, losses) in budgets.items()
                },
                "notes": notes,
            }
        )
    return Comparison(report_file=target.report_file, notes=tuple(notes))


def _compared_records(runs: Mapping[str, RecordedRun]) -> list[str]:
    """Return a section for each file of records that several runs have, as HTML."""
    known = [name for name, run in runs.items() if run.summary.get("parameters_total") is not None]
    known.sort(key=lambda name: runs[name].summary["parameters_total"])
    by_size = {name: runs[name] for name in known}
    sections = []
    for file, address in COMPARED.items():
        recorded = {n: run for n, run in by_size.items() if (run.directory.path / file).exists()}
        if len(recorded) > 1:
            sections.append(pkgutil.resolve_name(address)(recorded))
    return sections


def shortest_names(paths: Sequence[str]) -> list[str]:
    """Return the shortest ends of paths that differ from one another.

    Raises:
        ValueError: A path is given twice.
    """
    parts = [pathlib.Path(path).resolve().parts for path in paths]
    longest = max(map(len, parts))
    for length in range(1, longest + 1):
        names = [os.sep.join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    raise ValueError(f"a run is named twice: {', '.join(paths)}")


def _without_run(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration without the section that names the run."""
    return {key: value for key, value in config.items() if key != "run"}
