# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Draws the plots and writes the HTML page of a run from its files."""

from __future__ import annotations

import pathlib
import pkgutil
from collections.abc import Mapping
from typing import Any

from jaxmoe.catalog.run_parts import FILES
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.provenance.lineage import read_lineage
from jaxmoe.run.reporting.pipelines import pipeline_of_report
from jaxmoe.run.reporting.recorded import RecordedRun
from jaxmoe.tracking.history import read_router_load
from jaxmoe.tracking.jsonl import Series
from jaxmoe.tracking.plots import plot_run
from jaxmoe.tracking.report import write_report
from sharding import axes as ax


def write_run_report(
    directory: RunDirectory,
    name: str,
    summary: Mapping[str, Any],
    samples: str,
    config: Mapping[str, Any],
    metrics: Series,
) -> None:
    """Write report.html from the files of a run and its summary.

    Args:
        directory: Run directory.
        name: Name of the run.
        summary: Content of summary.json.
        samples: Generated text; may be empty.
        config: Configuration of the run as JSON.
        metrics: Steps and values by metric, of metrics.jsonl.

    Raises:
        OSError: The page cannot be written.
        ValueError: lineage.json is damaged.
    """
    has_loads = directory.router_file.exists()
    stages = (summary.get("mesh") or {}).get(ax.STAGE, 1)
    rewards = directory.plots_directory / "rewards.png"
    sections = [
        pkgutil.resolve_name(section)(directory, metrics)
        for name, (_, section) in FILES.items()
        if (directory.path / name).exists()
    ]
    write_report(
        directory.report_file,
        title=f"jaxmoe: {name}",
        summary=summary,
        metrics=metrics,
        load=read_router_load(directory.router_file) if has_loads else None,
        more_sections=sections,
        plots=[rewards] if rewards.exists() else [],
        samples=samples,
        config=config,
        lineage=[(event.time, str(event)) for event in read_lineage(directory)],
        environment=directory.environment(),
        pipeline=None if stages == 1 else pipeline_of_report(stages, config),
    )


def rebuild_report(run: RecordedRun) -> pathlib.Path:
    """Draw the plots of a run and write its report.html anew.

    Args:
        run: Files of the run.

    Returns:
        The path of report.html.

    Raises:
        ValueError: The directory cannot be written.
    """
    directory = run.directory
    with directory.usable():
        plot_run(
            run.series,
            directory.router_file,
            directory.plots_directory,
            references=run.summary.get("references_bits"),
            bytes_per_token=run.bytes_per_token,
        )
        samples = directory.samples_file
        write_run_report(
            directory,
            directory.path.resolve().name,
            {**run.summary, "bytes_per_token": run.bytes_per_token},
            samples.read_text() if samples.exists() else "",
            run.config,
            run.series,
        )
    return directory.report_file
