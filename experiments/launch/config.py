# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`LaunchConfig`: the command to start and the cluster; `SuperviseConfig`: on this host.

To add a cluster: `experiments/launch/slurm.py` as the example, and the union ClusterConfig in
`experiments/launch/config.py`.
"""

from __future__ import annotations

import dataclasses
import re
import shlex

from experiments.launch.elastic import ElasticConfig, FixedConfig
from experiments.launch.job import Job, check_text
from experiments.launch.jobset import JobSetConfig
from experiments.launch.slurm import SlurmConfig
from experiments.launch.tpu_vm import TpuVmConfig
from jaxmoe.configs import registry_of
from jaxmoe.resilience.shared_memory import PARENT
from sharding.distributed import host_and_port

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
    command: str = "jaxmoe pretrain"
    """Command line of every process, in one string."""
    cluster: ClusterConfig = SlurmConfig()
    """Cluster and its size."""

    def __post_init__(self):
        check_text("command", self.command, is_shell=True)
        try:
            arguments = shlex.split(self.command)
        except ValueError as error:
            raise ValueError(f"command={self.command!r} does not end ({error}): quote it") from None
        if not arguments:
            raise ValueError('command is empty: give it, such as "jaxmoe pretrain"')
        self.cluster.check(self.job)

    @property
    def job(self) -> Job:
        """Job that the cluster runs."""
        return Job(name=self.run.name, command=self.command)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RestartConfig:
    """Processes of a job or of each site, and limits of their restarts."""

    run: LaunchRunConfig = LaunchRunConfig()
    """Directory of the launcher's files, which is not the directory of a run."""
    processes: int = 1
    """Processes on this host; with --islands, of each site."""
    max_restarts: int = 10
    """Largest number of restarts, of a site by itself; a start that lasted `steady` seconds resets
    the count."""
    steady: int = 3600
    """Seconds after which a start counts as good."""
    silence: int = 900
    """Seconds without output from any process after which they count as hung."""
    grace: int = 5
    """Seconds for the others to end when one is lost, before they are killed."""
    snapshots: str = PARENT
    """Directory in memory for the snapshots of the processes; deleted at the end."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SuperviseConfig(RestartConfig):
    """Processes to start, and limits of restarts."""

    command: str = "jaxmoe pretrain"
    """Command of each process."""
    elastic: ElasticConfig = FixedConfig()
    """Action when the same process is lost again and again: fixed restarts all; shrink goes on with
    fewer."""
    coordinator: str | None = None
    """host:port of process 0, with supervisors on several hosts."""
    num_processes: int | None = None
    """Number of processes on all hosts; those of this one when None."""
    first_process: int = 0
    """Number of the first process of this host."""
    exclude: tuple[int, ...] = ()
    """Numbers of processes that are not started, such as those of a slow device; the others are
    numbered anew and continue from the checkpoint. On several hosts, the same for all."""

    def __post_init__(self):
        for field, lowest in (("processes", 1), ("max_restarts", 0), ("steady", 1)):
            if getattr(self, field) < lowest:
                raise ValueError(f"{field}={getattr(self, field)} must be at least {lowest}")
        for field in ("silence", "grace"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}={getattr(self, field)} must be at least 1 second")
        if self.total > self.processes and self.coordinator is None:
            raise ValueError(
                f"num_processes={self.num_processes} are more than the processes={self.processes}"
                " of this host: give the --coordinator at which they meet, such as node0:8476"
            )
        if not 0 <= self.first_process <= self.total - self.processes:
            raise ValueError(
                f"first_process={self.first_process} and processes={self.processes} must lie within"
                f" num_processes={self.total}: processes count from 0, over all hosts"
            )
        if self.total > self.processes and self.elastic != FixedConfig():
            raise ValueError(
                f"elastic={self.elastic.name} leaves out processes of this host, and"
                f" num_processes={self.num_processes} are on several: set elastic to fixed"
            )
        if self.coordinator is not None:
            host_and_port(self.coordinator)
        for number in self.exclude:
            if not 0 <= number < self.total:
                raise ValueError(
                    f"exclude={number} is no process: they count from 0 to {self.total - 1}"
                )
        if len(set(self.exclude)) == self.total:
            raise ValueError(f"exclude leaves none of the {self.total} processes: leave one out")
        if not shlex.split(self.command):
            raise ValueError("command is empty: give what each process runs")

    @property
    def total(self) -> int:
        """Number of processes on all hosts, excluded ones too."""
        return self.processes if self.num_processes is None else self.num_processes

    @property
    def here(self) -> tuple[int, ...]:
        """Numbers of the started processes of this host, excluded ones not counted."""
        processes = [number for number in range(self.total) if number not in self.exclude]
        local = range(self.first_process, self.first_process + self.processes)
        return tuple(index for index, number in enumerate(processes) if number in local)

    @property
    def num_started(self) -> int:
        """Number of started processes on all hosts."""
        return self.total - len(set(self.exclude))
