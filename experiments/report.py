# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Compares runs on one HTML page; of one run, draws its own page anew.

    python -m experiments.report runs/pretrain/a runs/pretrain/b [--run.directory DIR]
    python -m experiments.report runs/pretrain/a

Curves by step, tokens, FLOPs and time; final numbers, and the loss at equal cost; the config fields
that differ; the load of the experts. Runs that are still going on are taken as far as they are.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.cli import flags as cli
from experiments.cli.output import write
from jaxmoe.checkpoint.migrate import migrate
from jaxmoe.configs import from_json, varying_fields
from jaxmoe.models.flops import flops_per_token
from jaxmoe.run.assemble import make_plan
from jaxmoe.run.config import PretrainConfig
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.report import write_run_report
from jaxmoe.tracking.comparison import ComparedRun, at_equal_cost, write_comparison
from jaxmoe.tracking.jsonl import Series, read_metrics
from jaxmoe.tracking.plots import plot_run
from jaxmoe.tracking.router_load import read_router_load
from jaxmoe.tracking.tracker import (
    BITS_PER_BYTE,
    BITS_PER_TOKEN,
    DROPPED_FRACTION,
    LOSS,
    MAX_VIOLATION,
    TRAINED_SECONDS,
    TRAINED_TOKENS,
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReportRunConfig:
    """Where the page goes."""

    directory: str | None = None
    """Directory of report.html and summary.json; runs/report/<names> when None."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReportConfig:
    """The comparison; the runs are given as words."""

    run: ReportRunConfig = ReportRunConfig()
    """Where the page goes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FoundRun:
    """What the files of a run say."""

    directory: RunDirectory
    config: Mapping[str, Any]
    summary: Mapping[str, Any]
    series: Series
    notes: tuple[str, ...]


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit code."""
    paths, flags = split_words(argv)
    prog = "python -m experiments.report RUN [RUN ...]"
    config = cli.parse_flags(ReportConfig(), flags, prog, __doc__ or "")
    with cli.exit_on_bad_configuration():
        if not paths:
            raise ValueError(
                "which runs? give their directories, such as runs/pretrain/a runs/pretrain/b"
            )
        found = [find(path) for path in paths]
        if len(found) == 1 and config.run.directory is None:
            write(_rebuild(found[0]))
        else:
            write(_compare(found, paths, config.run.directory))
    return int(cli.ExitCode.DONE)


def split_words(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Directories, and flags with their values, wherever they stand."""
    paths: list[str] = []
    flags: list[str] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        if not word.startswith("-"):
            paths.append(word)
            continue
        flags.append(word)
        if word.startswith("--") and word != "--help" and "=" not in word and words:
            flags.append(words.pop(0))
    return paths, flags


def find(path: str) -> FoundRun:
    """Reads a run's files, finished or not.

    Raises:
        ValueError: no run there, none of its steps recorded, or a damaged file.
    """
    directory = RunDirectory(path)
    if not directory.path.is_dir():
        raise ValueError(f"{path} is no directory: give that of a run, such as runs/pretrain/tiny")
    config = directory.config_json()
    try:
        series = read_metrics(directory.metrics_file)
    except FileNotFoundError:
        series = {}
    if LOSS not in series:
        raise ValueError(f"{path} has no steps yet ({directory.metrics_file.name}): wait for some")
    summary, notes = directory.summary(), []
    steps = int(series[LOSS][0][-1])
    if summary is None or summary.get("steps", 0) < steps:
        planned = config.get("training", {}).get("steps", "?")
        notes.append(f"{path} has not ended: step {steps} of {planned}, numbers so far")
        summary = {**(summary or {}), **_so_far(series, steps)}
    elif summary.get("status") != "done":
        notes.append(f"{path} ended early: {summary.get('status')} at step {summary.get('steps')}")
    for name, what in ((TRAINED_TOKENS, "tokens"), (TRAINED_SECONDS, "times")):
        if name not in series:
            notes.append(f"{path} was written by a version that did not record {what}")
    return FoundRun(
        directory=directory, config=config, summary=summary, series=series, notes=tuple(notes)
    )


def _so_far(series: Series, steps: int) -> dict[str, Any]:
    """What summary.json would say of a run that goes on."""

    def last(name: str) -> float | None:
        return float(series[name][1][-1]) if name in series else None

    return {
        "status": "unfinished",
        "steps": steps,
        "tokens": last(TRAINED_TOKENS),
        "trained_seconds": last(TRAINED_SECONDS),
        "final_loss": last(LOSS),
        "eval_bits_per_byte": last(BITS_PER_BYTE),
        "eval_bits_per_token": last(BITS_PER_TOKEN),
        "router_max_violation": last(MAX_VIOLATION),
        "router_dropped_fraction": last(DROPPED_FRACTION),
    }


def _rebuild(run: FoundRun) -> str:
    """One run: its own page, from its files."""
    directory = run.directory
    samples = directory.samples_file
    plot_run(
        directory.metrics_file,
        directory.router_file,
        directory.plots_directory,
        indicators_file=directory.indicators_file,
        references=run.summary.get("references_bits"),
        bytes_per_token=_bytes_per_token(run),
    )
    write_run_report(
        directory,
        directory.path.resolve().name,
        run.summary,
        samples.read_text() if samples.exists() else "",
        run.config,
    )
    return "\n".join([*run.notes, f"see {directory.report_file}"])


def _compare(found: Sequence[FoundRun], paths: Sequence[str], where: str | None) -> str:
    """Writes the page and summary.json; returns what to print."""
    names = run_names(paths)
    default = "_".join(name.replace(os.sep, "-") for name in names)[:80]
    directory = RunDirectory(where or f"runs/report/{default}")
    directory.check_free_of_runs()
    notes = [note for run in found for note in run.notes]
    runs = []
    for name, run in zip(names, found, strict=True):
        flops = _flops_per_token(run)
        if flops is None:
            notes.append(f"{name}: its config is of another version, FLOPs are not known")
        load = None
        if run.directory.router_file.exists():
            _, loads = read_router_load(run.directory.router_file)
            load = loads[-1] if len(loads) else None
        runs.append(
            ComparedRun(
                name=name,
                summary={**run.summary, "model_flops_per_token": flops},
                series=run.series,
                load=load,
                flops_per_token=flops,
                bytes_per_token=_bytes_per_token(run),
            )
        )
    differing = varying_fields([_without_run(run.config) for run in found])
    directory.acquire()
    try:
        write_comparison(
            directory.report_file,
            title=" against ".join(names) if len(names) < 4 else f"{len(names)} runs",
            runs=runs,
            differing=differing,
            notes=notes,
        )
        budgets = {axis: at_equal_cost(runs, axis) for axis in ("tokens", "FLOPs", "time")}
        directory.write_summary(
            {
                "status": "done",
                "runs": {
                    name: {"directory": path, **run.summary}
                    for name, path, run in zip(names, paths, runs, strict=True)
                },
                "differing_fields": differing,
                "training_bits_at_equal": {
                    axis: {"budget": budget, **dict(zip(names, losses, strict=True))}
                    for axis, (budget, losses) in budgets.items()
                },
                "notes": notes,
            }
        )
    finally:
        directory.release()
    return "\n".join([*notes, f"see {directory.report_file}"])


def run_names(paths: Sequence[str]) -> list[str]:
    """The shortest ends of the paths that tell them apart."""
    parts = [pathlib.Path(path).resolve().parts for path in paths]
    longest = max(map(len, parts))
    for length in range(1, longest + 1):
        names = [os.sep.join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    raise ValueError(f"a run is named twice: {', '.join(paths)}")


def _without_run(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != "run"}


def _flops_per_token(run: FoundRun) -> float | None:
    """From the summary, or from the config if this version can read it."""
    if run.summary.get("model_flops_per_token") is not None:
        return float(run.summary["model_flops_per_token"])
    try:
        config = from_json(PretrainConfig, migrate(run.config))
    except ValueError:
        return None
    plan = make_plan(config)
    return flops_per_token(plan.model, plan.table, config.training.sequence_length)


def _bytes_per_token(run: FoundRun) -> float | None:
    """From the summary, or from a held-out loss in both units."""
    if run.summary.get("bytes_per_token") is not None:
        return float(run.summary["bytes_per_token"])
    if BITS_PER_BYTE not in run.series or BITS_PER_TOKEN not in run.series:
        return None
    ratio = run.series[BITS_PER_TOKEN][1][-1] / run.series[BITS_PER_BYTE][1][-1]
    return float(ratio) if np.isfinite(ratio) else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
