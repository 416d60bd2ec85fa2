# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Compares runs on one HTML page, or writes the page of one run anew.

    jaxmoe report runs/pretrain/a runs/pretrain/b [--run.directory DIR]
    jaxmoe report runs/pretrain/a

Curves by step, tokens, FLOPs and time; final numbers, and the loss at equal cost; the config fields
that differ; the load of the experts. Runs that have not ended are compared by their steps so far.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from experiments.cli import flags
from experiments.cli.exit import run_command
from experiments.cli.exit_codes import ExitCode
from experiments.cli.following import after_report, write_next
from experiments.cli.model import check_model, default_model
from experiments.cli.output import write
from jaxmoe.run.reporting.compare import compare_runs
from jaxmoe.run.reporting.recorded import RecordedRun, read_run
from jaxmoe.run.reporting.report import rebuild_report


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReportRunConfig:
    """Destination of the page."""

    directory: str | None = None
    """Directory of report.html and summary.json; runs/report/<names> when None."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReportConfig:
    """Comparison of runs, whose directories are given as words."""

    run: ReportRunConfig = ReportRunConfig()
    """Destination of the page."""


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    paths, arguments = split_words(argv)
    prog = "jaxmoe report RUN [RUN ...]"
    config = flags.parse_flags(ReportConfig(), arguments, prog, __doc__ or "")
    with flags.exit_on_bad_configuration():
        if not paths and (demo := default_model()) is not None:
            paths = [demo]
        if not paths:
            raise ValueError(
                "no run is given: name run directories, such as runs/pretrain/a runs/pretrain/b"
            )
        for path in paths:
            check_model(path)
        runs = [read_run(path) for path in paths]
        write("drawing plots and the report ...")
        if len(runs) == 1 and config.run.directory is None:
            page = rebuild_report(runs[0])
            notes = runs[0].notes
        else:
            comparison = compare_runs(runs, config.run.directory)
            page = comparison.report_file
            notes = comparison.notes
    write("\n".join([*notes, f"see {page}"]))
    write_next(after_report(held_out_losses(runs)))
    return int(ExitCode.DONE)


def held_out_losses(runs: Sequence[RecordedRun]) -> dict[str, float | None]:
    """Return the held-out losses by run directory: per byte if a run has that, else per token.

    Args:
        runs: Runs of a page.
    """
    is_by_byte = any(run.summary.get("eval_bits_per_byte") is not None for run in runs)
    name = "eval_bits_per_byte" if is_by_byte else "eval_bits_per_token"
    return {str(run.directory.path): run.summary.get(name) for run in runs}


def split_words(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line into run directories, and flags with their values."""
    paths: list[str] = []
    flag_words: list[str] = []
    arguments = list(argv)
    while arguments:
        word = arguments.pop(0)
        if not word.startswith("-"):
            paths.append(word)
            continue
        flag_words.append(word)
        if word.startswith("--") and word != "--help" and "=" not in word and arguments:
            flag_words.append(arguments.pop(0))
    return paths, flag_words


if __name__ == "__main__":
    run_command(main)
