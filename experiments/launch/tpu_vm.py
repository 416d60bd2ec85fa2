# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Starts a job on a TPU VM of Google Cloud, by a script around gcloud.

The options are those of gcloud's manual; no script has been run on a cluster.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from typing import ClassVar

from experiments.launch.job import Job, LaunchFiles, check_directory, check_text, check_word

_LEFT_BEHIND = ("./.venv", "./runs", "./.cache", "./.*_cache", "./.docs/_build", "__pycache__")
"""Patterns of tar for what stays here when the directory is copied."""

_INTERPRETER = re.compile(r"(/\S*/)?python[\d.]*")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TpuVmConfig:
    """A script around gcloud: creates a TPU VM, copies this directory, runs the command on it."""

    name: ClassVar[str] = "tpu_vm"

    accelerator_type: str = "v5litepod-16"
    """Kind and size as Google Cloud writes them: chips for v5litepod and v6e, else cores, two per
    chip."""
    zone: str = ""
    """Zone of Google Cloud, such as us-central1-a; required."""
    runtime_version: str = "v2-alpha-tpuv5-lite"
    """Image of the VM."""
    project: str | None = None
    """Project; gcloud's own when None."""
    setup: str = "python3 -m pip install -q -e '.[train,tpu]'"
    """Shell line on every host, in the copied directory, after each copy. The Python with which it
    begins must be 3.11 or newer."""

    def __post_init__(self):
        check_word("cluster.accelerator_type", self.accelerator_type, "Google Cloud")
        match = re.fullmatch(r"(v2|v3|v4|v5litepod|v5p|v6e)-([1-9]\d*)", self.accelerator_type)
        if match is None:
            raise ValueError(
                f"cluster.accelerator_type={self.accelerator_type} is unknown: give a kind (v2, v3,"
                " v4, v5litepod, v5p, v6e) and a size, such as v5litepod-16"
            )
        if (self.chips > 8 or "lite" not in match[1] and match[1] != "v6e") and self.chips % 4:
            raise ValueError(
                f"cluster.accelerator_type={self.accelerator_type} has {self.chips} chips, which"
                " must be divisible by the 4 of a host"
            )
        for field in ("zone", "project", "runtime_version"):
            check_word(f"cluster.{field}", getattr(self, field), "Google Cloud")
        check_text("cluster.setup", self.setup, is_shell=True)

    @property
    def chips(self) -> int:
        """Number of chips of the whole VM."""
        kind, _, size = self.accelerator_type.partition("-")
        return int(size) if kind in ("v5litepod", "v6e") else int(size) // 2

    @property
    def num_hosts(self) -> int:
        """Number of hosts; up to 8 chips of v5e and v6e are one."""
        is_lite = self.accelerator_type.startswith(("v5litepod", "v6e"))
        return 1 if is_lite and self.chips <= 8 else self.chips // 4

    @property
    def num_processes(self) -> int:
        """Number of JAX processes."""
        return self.num_hosts

    def check(self, job: Job) -> None:
        """Refuse a job without a zone, or whose hosts share no run directory.

        Raises:
            ValueError: A field or flag is missing.
        """
        if not self.zone:
            raise ValueError("cluster.zone must be given, such as us-central1-a")
        if self.num_hosts > 1:
            check_directory(job, "/", "that all hosts have mounted")

    def files(self, job: Job) -> LaunchFiles:
        """Return the script around gcloud.

        Args:
            job: Job to start.
        """
        place = [f"--zone={self.zone}"]
        if self.project is not None:
            place.append(f"--project={self.project}")
        name = job.name
        where = shlex.join(place)
        # JAX reads the addresses of the processes from the metadata of the VM, given their number.
        # Where pip puts the commands of a user who cannot write into the system.
        path = 'PATH="$PATH:$HOME/.local/bin"'
        start = f"{path} JAX_NUM_PROCESSES={self.num_hosts} {job.shell_line}"
        remote = " && ".join([f"cd {name}", *_python_check(job.words[0]), start])
        setup = [self.setup] if self.setup else []
        unpack = f"mkdir -p {name} && tar -xzf {name}.tgz -C {name} && rm {name}.tgz && cd {name}"
        ready = " && ".join([*_python_check(*self.setup.split()[:1]), "true"])
        vm = "gcloud compute tpus tpu-vm"
        left_behind = " ".join(f"--exclude={shlex.quote(pattern)}" for pattern in _LEFT_BEHIND)
        text = f"""#!/bin/bash
# Usage: tpu_vm.sh create | copy | run | delete, in the directory of the repository.
# run starts the same command again, which resumes from the last checkpoint.
set -euo pipefail

copy() {{
  {vm} ssh {name} --worker=all {where} --command={shlex.quote(ready)}
  local packed
  packed=$(mktemp -d)
  tar -czf "$packed/{name}.tgz" {left_behind} .
  {vm} scp "$packed/{name}.tgz" {name}:{name}.tgz --worker=all {where}
  rm -r "$packed"
  {vm} ssh {name} --worker=all {where} --command={shlex.quote(" && ".join([unpack, *setup]))}
}}

case "${{1:-}}" in
  create)
    {vm} create {name} {where} \\
      --accelerator-type={shlex.quote(self.accelerator_type)} \\
      --version={shlex.quote(self.runtime_version)}
    copy
    ;;
  copy) copy ;;
  run) {vm} ssh {name} --worker=all {where} --command={shlex.quote(remote)} ;;
  delete) {vm} delete {name} {where} ;;
  *) sed -n '2,3s/^# //p' "$0"; exit 2 ;;
esac
"""
        start = "bash {directory}/tpu_vm.sh create && bash {directory}/tpu_vm.sh run"
        return LaunchFiles(files={"tpu_vm.sh": text}, start=start)


def _python_check(*command: str) -> list[str]:
    """Return shell lines that end with 2 where an interpreter is missing or too old for jaxmoe."""
    return [
        f"{{ {word} -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {{ echo"
        f' "error: $(hostname): {word} is missing or older than Python 3.11: choose another'
        ' cluster.runtime_version, or name another in command and cluster.setup" >&2; exit 2; }; }'
        for word in command
        if _INTERPRETER.fullmatch(word)
    ]
