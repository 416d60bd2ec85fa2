# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Starts a job on Slurm, by a script for sbatch.

The names of the options are those of Slurm's manual; no script has been run on a cluster.
"""

from __future__ import annotations

import dataclasses
import re
from typing import ClassVar

from experiments.cli.exit_codes import ExitCode
from experiments.launch.job import Job, LaunchFiles, check_at_least, check_text


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SlurmConfig:
    """A script for sbatch: one process per GPU, or per node without GPUs."""

    name: ClassVar[str] = "slurm"

    nodes: int = 1
    """Nodes of the job."""
    gpus_per_node: int = 8
    """GPUs of each node (dies of an MI250X), with a process each; 0 for a job on CPUs, one process
    per node."""
    time: str = "24:00:00"
    """Time limit as [days-]hours:minutes:seconds."""
    partition: str | None = None
    """Partition; the cluster's default when None."""
    account: str | None = None
    """Account; the cluster's default when None."""
    grace: int = 300
    """Seconds before the time limit at which SIGTERM is sent, to save a last checkpoint."""
    setup: str = "source .venv/bin/activate"
    """Shell line before the command, in the directory from which the job is submitted."""

    def __post_init__(self):
        check_at_least("cluster.nodes", self.nodes, 1)
        check_at_least("cluster.gpus_per_node", self.gpus_per_node, 0)
        check_at_least("cluster.grace", self.grace, 0)
        if not re.fullmatch(r"(\d+-)?\d+:\d\d:\d\d", self.time):
            raise ValueError(
                f"cluster.time={self.time!r} is not [days-]hours:minutes:seconds, such as 24:00:00"
            )
        for field in ("partition", "account"):
            value = getattr(self, field)
            if value is not None and not re.fullmatch(r"\w[\w.,-]*", value):
                raise ValueError(f"cluster.{field}={value!r} is not a name that Slurm accepts")
        check_text("cluster.setup", self.setup, is_shell=True)

    @property
    def num_hosts(self) -> int:
        """Number of hosts."""
        return self.nodes

    @property
    def num_processes(self) -> int:
        """Number of JAX processes."""
        return self.nodes * max(1, self.gpus_per_node)

    def check(self, job: Job) -> None:
        """Accept every job."""

    def files(self, job: Job) -> LaunchFiles:
        """Return the script for sbatch.

        Args:
            job: Job to start.
        """
        options = {
            "job-name": job.name,
            "nodes": self.nodes,
            "ntasks-per-node": max(1, self.gpus_per_node),
            "gpus-per-node": self.gpus_per_node or None,
            "time": self.time,
            "partition": self.partition,
            "account": self.account,
            "signal": f"TERM@{self.grace}" if self.grace else None,
            "output": "%x-%j.log",
            "open-mode": "append",
        }
        lines = [
            f"#SBATCH --{name}={value}" for name, value in options.items() if value is not None
        ]
        text = "\n".join(
            (
                "#!/bin/bash",
                *lines,
                "#SBATCH --requeue",
                "set -u",
                'cd "$SLURM_SUBMIT_DIR" || exit 2',
                *([self.setup] if self.setup else []),
                "# A process that ends after saving must not end the others.",
                f"srun --kill-on-bad-exit=0 {job.shell_line}",
                "code=$?",
                "# Saved after SIGTERM: the same command resumes.",
                f'if [ "$code" -eq {int(ExitCode.PREEMPTED)} ]; then',
                '  scontrol requeue "$SLURM_JOB_ID"',
                "fi",
                'exit "$code"',
                "",
            )
        )
        return LaunchFiles(files={"job.sbatch": text}, start="sbatch {directory}/job.sbatch")
