# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
r"""Writes the files that start a command on every host of a cluster, or supervises it on this host.

    jaxmoe launch cluster:slurm --cluster.nodes 4 \
        --command "jaxmoe pretrain d16 --run.directory /shared/d16"
    jaxmoe launch cluster:jobset --cluster.topology 16x16 \
        --cluster.image europe-docker.pkg.dev/project/images/jaxmoe --cluster.volume_claim runs \
        --command "jaxmoe pretrain d16 --run.directory /runs/d16"
    jaxmoe launch cluster:tpu_vm --cluster.accelerator_type v5litepod-64 \
        --cluster.zone us-central1-a \
        --command "jaxmoe pretrain d16 --run.directory /mnt/runs/d16"
    jaxmoe launch --supervise --processes 4 \
        --command "jaxmoe pretrain --run.directory runs/pretrain/four"
    jaxmoe launch --islands 4 \
        --command "jaxmoe pretrain --run.directory runs/pretrain/four replicas:diloco"

Writes a script for sbatch, a JobSet for GKE, or a script around gcloud, and a `summary.json`, into
`--run.directory`; files of an earlier launch that differ are replaced with `--run.replace True`
only. JAX reads the addresses of its processes from the cluster's environment. The last two forms
start the processes themselves, and restart them when one is lost: see `--supervise --help` for the
processes of one run, `--islands 4 --help` for replicas that are jobs of their own.

A job that ended with 75 (saved after SIGTERM) is restarted where the cluster can do so; one that
ended with 2 or 3 (bad configuration, diverged) is not.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence

from experiments.cli import flags
from experiments.cli.exit import run_command
from experiments.cli.exit_codes import ExitCode
from experiments.cli.output import write
from experiments.cli.parts import part_at
from experiments.launch import supervise
from experiments.launch.config import LaunchConfig
from jaxmoe.run.directory import RunDirectory

_SITES = "experiments.launch.sites:main"
"""Command of `--islands`."""


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    if "--supervise" in argv:
        return supervise.main([word for word in argv if word != "--supervise"])
    if any(word.partition("=")[0] == "--islands" for word in argv):
        return part_at(_SITES)(argv)
    prog = "jaxmoe launch"
    with flags.exit_on_bad_configuration():
        config = flags.parse_flags(LaunchConfig(), argv, prog, __doc__ or "")
        directory = RunDirectory(config.run.directory or f"runs/launch/{config.run.name}")
        directory.check_free_of_runs()
        cluster = config.cluster
        written = cluster.files(config.job)
        if not config.run.replace:
            _check_replaces_nothing(directory.path, written.files)
        directory.acquire()
        for name, text in written.files.items():
            (directory.path / name).write_text(text, encoding="utf-8")
        start = written.start_in(str(directory.path))
        directory.write_summary(
            {
                "status": "done",
                "cluster": cluster.name,
                "hosts": cluster.num_hosts,
                "processes": cluster.num_processes,
                "command": config.command,
                "files": list(written.files),
                "start": start,
            }
        )
        directory.release()
    hosts = f"{cluster.num_hosts} host{'s' * (cluster.num_hosts > 1)}"
    processes = f"{cluster.num_processes} process{'es' * (cluster.num_processes > 1)}"
    write("\n".join(f"wrote {directory.path / name}" for name in written.files))
    write(f"{hosts}, {processes}; start it with\n  {start}")
    return int(ExitCode.DONE)


def _check_replaces_nothing(directory: pathlib.Path, files: Mapping[str, str]) -> None:
    """Refuse to replace files of another launch."""
    for name, text in files.items():
        path = directory / name
        if path.exists() and path.read_text(encoding="utf-8", errors="replace") != text:
            raise ValueError(
                f"{path} is of another launch: choose another --run.name or --run.directory, or"
                " replace it with --run.replace True"
            )


if __name__ == "__main__":
    run_command(main)
