# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Writes the last files of a run: samples, pictures, report and summary."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import jax

from jaxmoe.configs import to_json
from jaxmoe.disk import DiskGuard, replace_file
from jaxmoe.messages import say
from jaxmoe.run.assemble import Assembly
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.reporter import Reporter
from jaxmoe.run.reporting.report import write_run_report
from jaxmoe.run.reporting.samples import sample_text
from jaxmoe.run.reporting.summary import (
    closing_message,
    load_window,
    reference_lines,
    summarise,
)
from jaxmoe.run.supervision import Watches
from jaxmoe.tracking.history import read_router_load
from jaxmoe.tracking.jsonl import CURVE_LINES, read_metrics
from jaxmoe.tracking.plots import plot_run
from jaxmoe.training.state import TrainState
from jaxmoe.training.stopwatch import FINISH

logger = logging.getLogger(__name__)


def finish_run(
    name: str,
    directory: RunDirectory,
    assembly: Assembly,
    watches: Watches,
    state: TrainState,
    facts: Mapping[str, Any],
) -> dict[str, Any]:
    """Write the last files of a run and log its closing message; a full disk is a warning.

    Args:
        name: Name of the run.
        directory: Run directory.
        assembly: Plan, devices and data of the run.
        watches: Records of the run, whose reporter is closed here.
        state: Last state.
        facts: See `summarise`; goodput and warnings are those of the records.

    Returns:
        The content of summary.json; empty on all processes but the first.
    """
    step = facts["steps"]
    status = facts["status"]
    watches.note(step, status)
    facts = {**facts, "goodput": watches.goodput(), "warnings": watches.warnings}
    watches.watchdog.beat("writing the report")
    with watches.spent.on(FINISH):
        summary = _write_files(name, directory, assembly, watches.reporter, state, facts)
    watches.note(step, status)
    return summary


def _write_files(
    name: str,
    directory: RunDirectory,
    assembly: Assembly,
    reporter: Reporter,
    state: TrainState,
    facts: Mapping[str, Any],
) -> dict[str, Any]:
    """Write samples, pictures, report and summary, and return the summary."""
    reporter.close()
    if jax.process_index() != 0:
        return {}
    say("computing reference losses ...")
    references = reference_lines(assembly)
    summary = summarise(assembly, reporter, facts, references)
    if directory.router_file.exists():
        summary["router_load_window"] = load_window(*read_router_load(directory.router_file))
    samples = ""
    length = assembly.plan.config.tracking.sample_length
    if facts["status"] == "done" and length and jax.process_count() == 1:
        say("writing samples ...")
        samples = sample_text(assembly, state, length)
        with DiskGuard(directory.samples_file).warning_once():
            replace_file(directory.samples_file, samples)
    say("drawing plots and the report ...")
    with DiskGuard(directory.report_file).warning_once():
        metrics = read_metrics(directory.metrics_file, max_lines=CURVE_LINES)
        plot_run(
            metrics,
            directory.router_file,
            directory.plots_directory,
            references=references,
            bytes_per_token=assembly.source.bytes_per_token,
        )
        config = to_json(assembly.plan.config)
        write_run_report(directory, name, summary, samples, config, metrics)
    try:
        directory.write_summary(summary)
    except ValueError as error:
        logger.warning("%s", error)
    say(closing_message(directory, summary, references))
    return summary
