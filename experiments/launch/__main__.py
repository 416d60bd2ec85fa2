# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Writes what starts the same command on every host of a cluster; or keeps it running on this one.

    python -m experiments.launch cluster:slurm --cluster.nodes 4 --command "COMMAND"
    python -m experiments.launch cluster:jobset --cluster.topology 16x16 --cluster.image IMAGE
    python -m experiments.launch cluster:tpu_vm --cluster.accelerator_type v5litepod-64
    python -m experiments.launch --supervise --processes 4 --command "COMMAND"

A script for sbatch, a JobSet for GKE, or a script around gcloud, and a `summary.json`, in
`--run.directory`. The processes of JAX find one another by the cluster's own variables. The last
form starts the processes itself, and again when one is lost: `--supervise --help`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from experiments.cli import flags as cli
from experiments.cli.output import write
from experiments.launch import supervise
from experiments.launch.config import LaunchConfig
from experiments.launch.files import write_files
from jaxmoe.configs import registry_name
from jaxmoe.run.directory import RunDirectory


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit code."""
    if "--supervise" in argv:
        return supervise.main([word for word in argv if word != "--supervise"])
    prog = "python -m experiments.launch"
    with cli.exit_on_bad_configuration():
        config = cli.parse_flags(LaunchConfig(), argv, prog, __doc__ or "")
        directory = RunDirectory(config.run.directory or f"runs/launch/{config.run.name}")
        directory.check_free_of_runs()
        files, start = write_files(config)
        directory.acquire()
        for name, text in files.items():
            (directory.path / name).write_text(text, encoding="utf-8")
        start = start.format(directory=directory.path)
        cluster = config.cluster
        directory.write_summary(
            {
                "status": "done",
                "cluster": registry_name(type(cluster)),
                "hosts": cluster.num_hosts,
                "processes": cluster.num_processes,
                "command": config.command,
                "files": list(files),
                "start": start,
            }
        )
        directory.release()
    hosts = f"{cluster.num_hosts} host{'s' * (cluster.num_hosts > 1)}"
    processes = f"{cluster.num_processes} process{'es' * (cluster.num_processes > 1)}"
    write("\n".join(f"wrote {directory.path / name}" for name in files))
    write(f"{hosts}, {processes}; start it with\n  {start}")
    return int(cli.ExitCode.DONE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
