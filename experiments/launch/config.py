# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Where `experiments.launch` is to start a command, and on how many hosts.

To add a cluster: a config here, a member of ClusterConfig, and its text in
`experiments/launch/files.py`.
"""

from __future__ import annotations

import dataclasses
import math
import re
import shlex
from typing import ClassVar, Literal

from jaxmoe.configs import registry_of

_NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
_CHIPS_PER_HOST = 4


def _check_at_least(path: str, value: int, lowest: int) -> None:
    if value < lowest:
        raise ValueError(f"{path}={value} must be at least {lowest}")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SlurmConfig:
    """A script for sbatch: one process per GPU, or per node without GPUs."""

    name: ClassVar[str] = "slurm"

    nodes: int = 1
    """Nodes of the job."""
    gpus_per_node: int = 8
    """GPUs of each node, with a process each; 0 for a job on CPUs, one process per node."""
    time: str = "24:00:00"
    """The longest the job may take, as Slurm spells it: [days-]hours:minutes:seconds."""
    partition: str | None = None
    """Partition; the cluster's default when None."""
    account: str | None = None
    """Account that pays; the cluster's default when None."""
    grace: int = 300
    """Seconds before the end at which SIGTERM asks for a last checkpoint."""
    setup: str = "source .venv/bin/activate"
    """Shell line before the command, in the directory from which the job is submitted."""

    def __post_init__(self):
        _check_at_least("cluster.nodes", self.nodes, 1)
        _check_at_least("cluster.gpus_per_node", self.gpus_per_node, 0)
        _check_at_least("cluster.grace", self.grace, 0)
        if not re.fullmatch(r"(\d+-)?\d+:\d\d:\d\d", self.time):
            raise ValueError(
                f"cluster.time={self.time} is not [days-]hours:minutes:seconds, such as 24:00:00"
            )
        for field in ("partition", "account"):
            value = getattr(self, field)
            if value is not None and not re.fullmatch(r"[\w.,-]+", value):
                raise ValueError(f"cluster.{field}={value!r} is no name that Slurm could have")

    @property
    def num_hosts(self) -> int:
        """Machines that run the command."""
        return self.nodes

    @property
    def num_processes(self) -> int:
        """Processes of JAX in all."""
        return self.nodes * max(1, self.gpus_per_node)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class JobSetConfig:
    """A JobSet for GKE with TPU node pools: one job per slice, one pod per host."""

    name: ClassVar[str] = "jobset"

    accelerator: Literal["v4", "v5e", "v5p", "v6e"] = "v5e"
    """Kind of TPU."""
    topology: str = "4x4"
    """Chips of one slice: two sizes for v5e and v6e, three for v4 and v5p."""
    slices: int = 1
    """Slices of that topology, joined by the data-centre network; mesh.replica is a multiple."""
    image: str = ""
    """Container image that holds this repository, installed; must be given."""
    volume_claim: str | None = None
    """PersistentVolumeClaim that every pod mounts at /runs, for the run directory; needed by more
    than one host."""
    max_restarts: int = 10
    """How often the whole set is started again after a failure or a preemption."""

    def __post_init__(self):
        _check_at_least("cluster.slices", self.slices, 1)
        _check_at_least("cluster.max_restarts", self.max_restarts, 0)
        dims = 2 if self.accelerator in ("v5e", "v6e") else 3
        if not re.fullmatch("x".join([r"[1-9]\d*"] * dims), self.topology):
            example = "x".join(["4"] * dims)
            raise ValueError(
                f"cluster.topology={self.topology} must be {dims} sizes for {self.accelerator},"
                f" such as {example}"
            )
        if self.chips > _CHIPS_PER_HOST and self.chips % _CHIPS_PER_HOST:
            raise ValueError(
                f"cluster.topology={self.topology} has {self.chips} chips, which must be divisible"
                f" by the {_CHIPS_PER_HOST} of a host: choose another topology"
            )

    @property
    def chips(self) -> int:
        """Of one slice."""
        return math.prod(int(size) for size in self.topology.split("x"))

    @property
    def chips_per_host(self) -> int:
        """Chips that one pod asks for."""
        return min(self.chips, _CHIPS_PER_HOST)

    @property
    def hosts_per_slice(self) -> int:
        """Pods of one job."""
        return self.chips // self.chips_per_host

    @property
    def num_hosts(self) -> int:
        """Machines that run the command."""
        return self.slices * self.hosts_per_slice

    @property
    def num_processes(self) -> int:
        """Processes of JAX in all."""
        return self.num_hosts


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TpuVmConfig:
    """A script around gcloud: creates a TPU VM, copies this directory, runs the command on it."""

    name: ClassVar[str] = "tpu_vm"

    accelerator_type: str = "v5litepod-16"
    """As Google Cloud spells it: chips for v5litepod and v6e, else cores, two per chip."""
    zone: str = ""
    """Zone; must be given."""
    runtime_version: str = "v2-alpha-tpuv5-lite"
    """Image of the VM."""
    project: str | None = None
    """Project; gcloud's own when None."""
    setup: str = "python3 -m pip install -q -e '.[train,tpu]'"
    """Shell line on every host, in the copied directory, before the first run."""

    def __post_init__(self):
        match = re.fullmatch(r"(v2|v3|v4|v5litepod|v5p|v6e)-([1-9]\d*)", self.accelerator_type)
        if match is None:
            raise ValueError(
                f"cluster.accelerator_type={self.accelerator_type} is none: give a kind (v2, v3,"
                " v4, v5litepod, v5p, v6e) and a size, such as v5litepod-16"
            )
        if (self.chips > 8 or "lite" not in match[1] and match[1] != "v6e") and self.chips % 4:
            raise ValueError(
                f"cluster.accelerator_type={self.accelerator_type} has {self.chips} chips, which"
                " must be divisible by the 4 of a host"
            )

    @property
    def chips(self) -> int:
        """Of the whole VM."""
        kind, _, size = self.accelerator_type.partition("-")
        return int(size) if kind in ("v5litepod", "v6e") else int(size) // 2

    @property
    def num_hosts(self) -> int:
        """Machines that run the command; up to 8 chips of v5e and v6e are one."""
        is_lite = self.accelerator_type.startswith(("v5litepod", "v6e"))
        return 1 if is_lite and self.chips <= 8 else self.chips // 4

    @property
    def num_processes(self) -> int:
        """Processes of JAX in all."""
        return self.num_hosts


ClusterConfig = SlurmConfig | JobSetConfig | TpuVmConfig

CLUSTERS = registry_of(ClusterConfig)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LaunchRunConfig:
    """Where the files go."""

    directory: str | None = None
    """Directory of the files and summary.json; runs/launch/<name> when None."""
    name: str = "jaxmoe"
    """Name of the job: lower-case letters, digits and hyphens."""

    def __post_init__(self):
        if not _NAME.fullmatch(self.name):
            raise ValueError(
                f"run.name={self.name!r} must be 1 to 40 lower-case letters, digits and hyphens,"
                " beginning with a letter, as all three clusters take it"
            )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LaunchConfig:
    """The same command on every host of a cluster."""

    run: LaunchRunConfig = LaunchRunConfig()
    """Where the files go."""
    command: str = "python -m experiments.pretrain"
    """What every process runs, in one string."""
    cluster: ClusterConfig = SlurmConfig()
    """Where."""

    def __post_init__(self):
        try:
            words = shlex.split(self.command)
        except ValueError as error:
            raise ValueError(f"command={self.command!r} does not end ({error}): quote it") from None
        if not words:
            raise ValueError('command is empty: give it, such as "python -m experiments.pretrain"')
        if isinstance(self.cluster, JobSetConfig):
            _check_jobset(self.cluster, words)
        elif isinstance(self.cluster, TpuVmConfig):
            if not self.cluster.zone:
                raise ValueError("cluster.zone must be given, such as us-central1-a")
            if self.cluster.num_hosts > 1:
                _check_directory(words, "/", "that all hosts have mounted")


def _check_jobset(cluster: JobSetConfig, words: list[str]) -> None:
    if not cluster.image:
        raise ValueError("cluster.image must be given: the container that holds this repository")
    if cluster.volume_claim is not None:
        _check_directory(words, "/runs/", "where the volume is mounted")
    elif cluster.num_hosts > 1:
        raise ValueError(
            f"the {cluster.num_hosts} hosts of cluster.topology={cluster.topology} x"
            f" cluster.slices={cluster.slices} write one run directory: give"
            " cluster.volume_claim, a PersistentVolumeClaim that all can write"
        )


def _check_directory(words: list[str], root: str, where: str) -> None:
    """Refuses a run directory that only one host would see."""
    text = " ".join(word.replace("=", " ", 1) for word in words)
    given = re.search(r"--run\.directory (\S+)", text)
    if given is None or not given[1].startswith(root):
        raise ValueError(
            f"command has {'no --run.directory' if given is None else given[0]}, which would"
            f" lie on each host's own disk: give one beneath {root}, {where}"
        )
