# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Examines this environment: versions, devices, collectives, kernels, disks, a tiny train step.

    jaxmoe doctor [--run.directory DIR]
    jaxmoe doctor --links [--mesh.tensor 8 ...]

A line per finding: ok, warning or problem, and what to do. Exit code 0 if there is no problem, 2
otherwise. On a pod or cluster run it as the job would be run, on every host. With `--links` it
measures the connections of a mesh instead: see `--links --help`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence

import jax

from experiments.cli import flags
from experiments.cli.exit import run_command
from experiments.cli.exit_codes import ExitCode
from experiments.cli.output import write
from experiments.cli.parts import part_at
from experiments.cli.process import start_process
from experiments.doctor.devices import examine_devices
from experiments.doctor.software import Finding, examine_software, in_words
from experiments.doctor.timeout import answer_within, check_timeout
from jaxmoe.run.directory import RunDirectory

_LINKS = "experiments.doctor.links:main"
"""Command of `--links`."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DoctorRunConfig:
    """Where the findings go."""

    directory: str = "runs/doctor"
    """Directory of summary.json and environment.json."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DoctorConfig:
    """What to examine."""

    run: DoctorRunConfig = DoctorRunConfig()
    """Where the findings go."""
    timeout: float = 300.0
    """Seconds after which devices that do not answer are a problem."""

    def __post_init__(self):
        check_timeout(self.timeout)


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    if "--links" in argv:
        return part_at(_LINKS)([word for word in argv if word != "--links"])
    prog = "jaxmoe doctor"
    config = flags.parse_flags(DoctorConfig(), argv, prog, __doc__ or "")
    directory = RunDirectory(config.run.directory)
    with flags.exit_on_bad_configuration():
        directory.check_free_of_runs()
    findings = examine_software(directory.path, os.environ)
    write("\n".join(map(in_words, findings)))
    # Processes that cannot meet would wait for minutes here, and fail without a reason.
    if any(f.level == "problem" and f.what in _BEFORE_DEVICES for f in findings):
        text = "not examined, because of the problem above"
        results = [Finding("warning", "devices", text, "mend that first")]
        is_first = True
    else:
        with answer_within(config.timeout):
            results = _join_and_examine()
        has_devices = not any(f.level == "problem" and f.what == "devices" for f in results)
        is_first = not has_devices or jax.process_index() == 0
    findings += results
    problems = sum(finding.level == "problem" for finding in findings)
    warnings = sum(finding.level == "warning" for finding in findings)
    if not is_first:
        for finding in results:
            if finding.level != "ok":  # the rest is printed by the first process
                write(in_words(finding))
        return _exit_code(problems)
    write("\n".join(map(in_words, results)))
    write(f"{_count(problems, 'problem')}, {_count(warnings, 'warning')}")
    summary = {
        "status": "done" if not problems else "problems",
        "problems": problems,
        "warnings": warnings,
        "findings": [dataclasses.asdict(finding) for finding in findings],
    }
    with flags.exit_on_bad_configuration(), directory.held():
        directory.write_summary(summary)
        directory.write_environment(
            [finding.text for finding in findings if finding.what == "devices"]
        )
    return _exit_code(problems)


def _join_and_examine() -> list[Finding]:
    """Join the other processes of the job, then examine the devices."""
    try:
        start_process(needs_devices=False)
    except (RuntimeError, ValueError) as error:
        return [
            Finding(
                "problem",
                "devices",
                f"the processes of this job cannot join: {error}",
                "start it with srun or on every host of the pod, or unset the variables"
                " of a job that it is not part of (JAX_COORDINATOR_ADDRESS, SLURM_*)",
            )
        ]
    return examine_devices()


_BEFORE_DEVICES = ("coordinator", "packages", "XLA_FLAGS")
"""With a problem in one of these, devices are not touched."""


def _exit_code(problems: int) -> int:
    return int(ExitCode.BAD_CONFIGURATION if problems else ExitCode.DONE)


def _count(number: int, what: str) -> str:
    return f"{number or 'no'} {what}{'' if number == 1 else 's'}"


if __name__ == "__main__":
    run_command(main)
