# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Writes the pictures and the HTML page of a run from its files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxmoe.run.directory import RunDirectory
from jaxmoe.tracking.jsonl import read_metrics
from jaxmoe.tracking.report import write_report
from jaxmoe.tracking.router_load import read_router_load


def write_run_report(
    directory: RunDirectory,
    name: str,
    summary: Mapping[str, Any],
    samples: str,
    config: Mapping[str, Any],
) -> None:
    """Writes the page about a run from its files and its summary.

    Args:
        directory: of the run.
        name: of the run.
        summary: the content of summary.json.
        samples: generated text, or nothing.
        config: as JSON.

    Raises:
        OSError: the page cannot be written.
    """
    has_loads = directory.router_file.exists()
    indicators = directory.plots_directory / "indicators.png"
    write_report(
        directory.report_file,
        title=f"jaxmoe: {name}",
        summary=summary,
        metrics=read_metrics(directory.metrics_file),
        load=read_router_load(directory.router_file) if has_loads else None,
        plots=[indicators] if indicators.exists() else (),
        samples=samples,
        config=config,
    )
