# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The text of the files that start a command on a cluster.

All three keep the exit codes: 75 (saved after SIGTERM) is started again where the cluster can, 2
and 3 (bad configuration, diverged) never. Every word of a config is quoted for the language it
stands in. None of the files has been run on a cluster from here: their syntax is tested, and the
names of Slurm's options, of the JobSet API (v1alpha2) and of gcloud are those of their manuals.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from experiments.cli.flags import ExitCode
from experiments.launch.config import JobSetConfig, LaunchConfig, SlurmConfig, TpuVmConfig

_NODE_SELECTORS = {
    "v4": "tpu-v4-podslice",
    "v5e": "tpu-v5-lite-podslice",
    "v5p": "tpu-v5p-slice",
    "v6e": "tpu-v6e-slice",
}


def write_files(config: LaunchConfig) -> tuple[dict[str, str], str]:
    """The files by name, and the line that starts the job with them.

    Args:
        config: checked.
    """
    cluster = config.cluster
    if isinstance(cluster, SlurmConfig):
        return {"job.sbatch": _slurm(config, cluster)}, "sbatch {directory}/job.sbatch"
    if isinstance(cluster, JobSetConfig):
        text = "\n".join(_yaml(_jobset(config, cluster))) + "\n"
        return {"jobset.yaml": text}, "kubectl apply -f {directory}/jobset.yaml"
    start = "bash {directory}/tpu_vm.sh create && bash {directory}/tpu_vm.sh run"
    return {"tpu_vm.sh": _tpu_vm(config, cluster)}, start


def _slurm(config: LaunchConfig, cluster: SlurmConfig) -> str:
    options = {
        "job-name": config.run.name,
        "nodes": cluster.nodes,
        "ntasks-per-node": max(1, cluster.gpus_per_node),
        "gpus-per-node": cluster.gpus_per_node or None,
        "time": cluster.time,
        "partition": cluster.partition,
        "account": cluster.account,
        "signal": f"TERM@{cluster.grace}" if cluster.grace else None,
        "output": "%x-%j.log",
        "open-mode": "append",
    }
    lines = [f"#SBATCH --{name}={value}" for name, value in options.items() if value is not None]
    return "\n".join(
        (
            "#!/bin/bash",
            *lines,
            "#SBATCH --requeue",
            "set -u",
            'cd "$SLURM_SUBMIT_DIR" || exit 2',
            *([cluster.setup] if cluster.setup else []),
            "# Who has saved and ended must not end the others; the dead are missed by heartbeat.",
            f"srun --kill-on-bad-exit=0 {_quoted(config.command)}",
            "code=$?",
            "# Saved after SIGTERM: the same command goes on from there.",
            f'if [ "$code" -eq {int(ExitCode.PREEMPTED)} ]; then',
            '  scontrol requeue "$SLURM_JOB_ID"',
            "fi",
            'exit "$code"',
            "",
        )
    )


def _jobset(config: LaunchConfig, cluster: JobSetConfig) -> dict[str, Any]:
    container: dict[str, Any] = {
        "name": "train",
        "image": cluster.image,
        "command": shlex.split(config.command),
        # TPU hosts find one another here, and the processes of JAX their coordinator.
        "ports": [{"containerPort": port} for port in (8471, 8080, 8476)],
        "resources": {"limits": {"google.com/tpu": cluster.chips_per_host}},
    }
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 300,
        "nodeSelector": {
            "cloud.google.com/gke-tpu-accelerator": _NODE_SELECTORS[cluster.accelerator],
            "cloud.google.com/gke-tpu-topology": cluster.topology,
        },
        "containers": [container],
    }
    if cluster.volume_claim is not None:
        container["volumeMounts"] = [{"name": "runs", "mountPath": "/runs"}]
        claim = {"claimName": cluster.volume_claim}
        pod["volumes"] = [{"name": "runs", "persistentVolumeClaim": claim}]
    never = [int(ExitCode.BAD_CONFIGURATION), int(ExitCode.DIVERGED)]
    rule = {"action": "FailJob", "onExitCodes": {"operator": "In", "values": never}}
    job = {
        "parallelism": cluster.hosts_per_slice,
        "completions": cluster.hosts_per_slice,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [rule]},
        "template": {"spec": pod},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {
            "name": config.run.name,
            # A slice is one node pool, and a node pool has one slice.
            "annotations": {
                "alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"
            },
        },
        "spec": {
            "failurePolicy": {
                "maxRestarts": cluster.max_restarts,
                "rules": [{"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
            },
            "replicatedJobs": [
                {"name": "slice", "replicas": cluster.slices, "template": {"spec": job}}
            ],
        },
    }


def _tpu_vm(config: LaunchConfig, cluster: TpuVmConfig) -> str:
    place = [f"--zone={cluster.zone}"]
    if cluster.project is not None:
        place.append(f"--project={cluster.project}")
    name, where = config.run.name, shlex.join(place)
    # The processes of JAX find one another by the VM's metadata, once they know of one another.
    remote = f"cd {name} && JAX_NUM_PROCESSES={cluster.num_hosts} {_quoted(config.command)}"
    vm = "gcloud compute tpus tpu-vm"
    return f"""#!/bin/bash
# Usage: tpu_vm.sh create | copy | run | delete, in the directory of the repository.
# run is the same command again and again: it goes on from the last checkpoint.
set -euo pipefail

copy() {{
  {vm} scp --recurse . {name}:{name} --worker=all {where}
  {vm} ssh {name} --worker=all {where} --command={shlex.quote(f"cd {name} && {cluster.setup}")}
}}

case "${{1:-}}" in
  create)
    {vm} create {name} {where} \\
      --accelerator-type={shlex.quote(cluster.accelerator_type)} \\
      --version={shlex.quote(cluster.runtime_version)}
    copy
    ;;
  copy) copy ;;
  run) {vm} ssh {name} --worker=all {where} --command={shlex.quote(remote)} ;;
  delete) {vm} delete {name} {where} ;;
  *) sed -n '2,3s/^# //p' "$0"; exit 2 ;;
esac
"""


def _quoted(command: str) -> str:
    return shlex.join(shlex.split(command))


def _yaml(value: Any, indent: str = "") -> list[str]:
    """Lines of block YAML; scalars as JSON, which is YAML as well."""
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
