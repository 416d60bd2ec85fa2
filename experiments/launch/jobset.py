# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Starts a job on GKE, by a JobSet (API v1alpha2): one job per slice, one pod per host.

The fields are those of the API's manual; no JobSet has been run on a cluster.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from experiments.cli.exit_codes import ExitCode
from experiments.launch.job import Job, LaunchFiles, check_at_least, check_directory, check_word

_CHIPS_PER_HOST = 4

_NODE_SELECTORS = {
    "v4": "tpu-v4-podslice",
    "v5e": "tpu-v5-lite-podslice",
    "v5p": "tpu-v5p-slice",
    "v6e": "tpu-v6e-slice",
}


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
    """PersistentVolumeClaim that every pod mounts at /runs, for the run directory; required for
    more than one host."""
    max_restarts: int = 10
    """Largest number of restarts of the whole set after a failure or a preemption."""

    def __post_init__(self):
        check_at_least("cluster.slices", self.slices, 1)
        check_at_least("cluster.max_restarts", self.max_restarts, 0)
        check_word("cluster.topology", self.topology, "GKE")
        check_word("cluster.image", self.image, "a container registry")
        check_word("cluster.volume_claim", self.volume_claim, "Kubernetes")
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
        """Number of chips of one slice."""
        return math.prod(int(size) for size in self.topology.split("x"))

    @property
    def chips_per_host(self) -> int:
        """Number of chips of one pod."""
        return min(self.chips, _CHIPS_PER_HOST)

    @property
    def hosts_per_slice(self) -> int:
        """Number of pods of one job."""
        return self.chips // self.chips_per_host

    @property
    def num_hosts(self) -> int:
        """Number of hosts."""
        return self.slices * self.hosts_per_slice

    @property
    def num_processes(self) -> int:
        """Number of JAX processes."""
        return self.num_hosts

    def check(self, job: Job) -> None:
        """Refuse a job without an image, or whose hosts share no run directory.

        Raises:
            ValueError: A field is missing.
        """
        if not self.image:
            raise ValueError(
                "cluster.image must be given: the container that holds this repository"
            )
        if self.volume_claim is not None:
            check_directory(job, "/runs/", "where the volume is mounted")
        elif self.num_hosts > 1:
            raise ValueError(
                f"the {self.num_hosts} hosts of cluster.topology={self.topology} x"
                f" cluster.slices={self.slices} write one run directory: give"
                " cluster.volume_claim, a PersistentVolumeClaim that all can write"
            )

    def files(self, job: Job) -> LaunchFiles:
        """Return the JobSet as YAML.

        Args:
            job: Job to start.
        """
        text = "\n".join(_yaml(self._manifest(job))) + "\n"
        return LaunchFiles(
            files={"jobset.yaml": text}, start="kubectl apply -f {directory}/jobset.yaml"
        )

    def _manifest(self, job: Job) -> dict[str, Any]:
        """Return the JobSet as a tree."""
        container: dict[str, Any] = {
            "name": "train",
            "image": self.image,
            "command": job.words,
            # Ports of the TPU hosts and of the coordinator of JAX.
            "ports": [{"containerPort": port} for port in (8471, 8080, 8476)],
            "resources": {"limits": {"google.com/tpu": self.chips_per_host}},
        }
        pod: dict[str, Any] = {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 300,
            "nodeSelector": {
                "cloud.google.com/gke-tpu-accelerator": _NODE_SELECTORS[self.accelerator],
                "cloud.google.com/gke-tpu-topology": self.topology,
            },
            "containers": [container],
        }
        if self.volume_claim is not None:
            container["volumeMounts"] = [{"name": "runs", "mountPath": "/runs"}]
            claim = {"claimName": self.volume_claim}
            pod["volumes"] = [{"name": "runs", "persistentVolumeClaim": claim}]
        never = [int(ExitCode.BAD_CONFIGURATION), int(ExitCode.DIVERGED)]
        rule = {"action": "FailJob", "onExitCodes": {"operator": "In", "values": never}}
        slice_job = {
            "parallelism": self.hosts_per_slice,
            "completions": self.hosts_per_slice,
            "completionMode": "Indexed",
            "backoffLimit": 0,
            "podFailurePolicy": {"rules": [rule]},
            "template": {"spec": pod},
        }
        return {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": {
                "name": job.name,
                # A slice is one node pool, and a node pool has one slice.
                "annotations": {
                    "alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"
                },
            },
            "spec": {
                "failurePolicy": {
                    "maxRestarts": self.max_restarts,
                    "rules": [
                        {"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
                    ],
                },
                "replicatedJobs": [
                    {"name": "slice", "replicas": self.slices, "template": {"spec": slice_job}}
                ],
            },
        }


def _yaml(value: Any, indent: str = "") -> list[str]:
    """Return lines of block YAML; scalars are JSON, which is YAML as well."""
    if isinstance(value, Mapping):
        lines = []
        for key, inner in value.items():
            head = f"{indent}{key if '/' not in key else json.dumps(key)}:"
            if isinstance(inner, Mapping | list):
                lines += [head, *_yaml(inner, indent + "  ")]
            else:
                lines.append(f"{head} {json.dumps(inner)}")
        return lines
    lines = []
    for item in value:
        inner = _yaml(item, indent + "  ") if isinstance(item, Mapping) else [json.dumps(item)]
        lines += [f"{indent}- {inner[0].lstrip()}", *inner[1:]]
    return lines
