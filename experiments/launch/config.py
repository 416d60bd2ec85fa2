# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`LaunchConfig`: the command to start and the cluster to start it on.

To add a cluster: `experiments/launch/slurm.py` as the example, and the union ClusterConfig in
`experiments/launch/config.py`.
"""

from __future__ import annotations

import dataclasses
import re
import shlex

from experiments.launch.job import Job, check_text
from experiments.launch.jobset import JobSetConfig
from experiments.launch.slurm import SlurmConfig
from experiments.launch.tpu_vm import TpuVmConfig
from jaxmoe.configs import registry_of

_NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")

ClusterConfig = SlurmConfig | JobSetConfig | TpuVmConfig

CLUSTERS = registry_of(ClusterConfig)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LaunchRunConfig:
    """Destination of the files."""

    directory: str | None = None
    """Directory of the files and summary.json; runs/launch/<name> when None."""
    name: str = "jaxmoe"
    """Name of the job: lower-case letters, digits and hyphens."""
    replace: bool = False
    """Replace the files of another launch in the directory."""

    def __post_init__(self):
        check_text("run.directory", self.directory)
        if not _NAME.fullmatch(self.name):
            raise ValueError(
                f"run.name={self.name!r} must be 1 to 40 lower-case letters, digits and hyphens,"
                " beginning with a letter, as all three clusters take it"
            )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LaunchConfig:
    """The same command on every host of a cluster."""

    run: LaunchRunConfig = LaunchRunConfig()
    """Destination of the files."""
    command: str = "python -m experiments.pretrain"
    """Command line of every process, in one string."""
    cluster: ClusterConfig = SlurmConfig()
    """Cluster and its size."""

    def __post_init__(self):
        check_text("command", self.command, is_shell=True)
        try:
            words = shlex.split(self.command)
        except ValueError as error:
            raise ValueError(f"command={self.command!r} does not end ({error}): quote it") from None
        if not words:
            raise ValueError('command is empty: give it, such as "python -m experiments.pretrain"')
        self.cluster.check(self.job)

    @property
    def job(self) -> Job:
        """Job that the cluster runs."""
        return Job(name=self.run.name, command=self.command)
