# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Examines versions, variables and disks, before the first use of devices.

Every check is a function that returns findings; none raises for what it finds. To add a check: a
function here, into `examine_software`.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import os
import pathlib
import platform
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from typing import Literal

import jaxmoe
from jaxmoe.run.environment import PACKAGES
from sharding.distributed import host_and_port, is_loopback, num_hosts

Level = Literal["ok", "warning", "problem"]

EXTRAS: dict[str, tuple[str, ...]] = {
    "train": ("tyro", "grain", "rich", "matplotlib", "tensorboardX", "tokenizers"),
    "hf": ("safetensors", "transformers", "torch"),
    "wandb": ("wandb",),
    "trackio": ("trackio",),
    "profile": ("xprof",),
    "plan": ("libtpu",),
}
"""Modules of each extra of pyproject.toml."""

NEEDED = ("train",)
"""Extras without which the main job does not run."""

GIGABYTE = 10**9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the doctor's report."""

    level: Level
    what: str
    """Subject in one or two terms."""
    text: str
    """What was found."""
    remedy: str = ""
    """What to do about it."""


def examine_software(directory: pathlib.Path, environment: Mapping[str, str]) -> list[Finding]:
    """Run all checks of this module.

    Args:
        directory: Directory of runs.
        environment: Environment variables.
    """
    return [
        *python_version(),
        *package_versions(),
        *plugin_versions(_installed(), environment),
        *extras(),
        *variables(environment),
        *coordinator(environment),
        *writable(directory, "run directory"),
    ]


def python_version() -> list[Finding]:
    """Python, and which jaxmoe it imports."""
    where = pathlib.Path(jaxmoe.__file__).resolve().parents[1]
    text = f"{platform.python_version()} at {sys.executable}, jaxmoe from {where}"
    return [Finding(level="ok", what="python", text=text)]


def package_versions() -> list[Finding]:
    """Return the versions of the required packages."""
    versions = {name: _version(name) for name in (*PACKAGES, "jaxtyping")}
    missing = [name for name, version in versions.items() if version is None]
    text = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    findings = [Finding(level="ok", what="packages", text=text)]
    if missing:
        findings.append(
            Finding(
                level="problem",
                what="packages",
                text=f"not installed: {', '.join(missing)}",
                remedy=f"pip install {' '.join(missing)}",
            )
        )
    return findings


def plugin_versions(installed: Mapping[str, str], environment: Mapping[str, str]) -> list[Finding]:
    """jaxlib and the backends' plugins, which have to fit jax.

    Args:
        installed: versions of all distributions by name.
        environment: the environment variables.
    """
    jax, jaxlib = installed.get("jax", "0"), installed.get("jaxlib", "0")
    findings = []
    if _numbers(jaxlib) > _numbers(jax):
        findings.append(
            Finding(
                level="problem",
                what="jaxlib",
                text=f"jaxlib {jaxlib} is newer than jax {jax}",
                remedy=f"pip install jax=={jaxlib} jaxlib=={jaxlib}",
            )
        )
    elif _numbers(jaxlib) < _numbers(jax):
        findings.append(
            Finding(
                level="warning",
                what="jaxlib",
                text=f"jaxlib {jaxlib} is older than jax {jax}",
                remedy=f"pip install jaxlib=={jax}",
            )
        )
    plugins = {n: v for n, v in installed.items() if re.fullmatch(r"jax-.*-(plugin|pjrt)", n)}
    for name, version in sorted(plugins.items()):
        if _numbers(version) != _numbers(jaxlib):
            extra = name.removeprefix("jax-").rpartition("-")[0]
            findings.append(
                Finding(
                    level="problem",
                    what="plugin",
                    text=f"{name} {version} does not fit jaxlib {jaxlib}: its devices are not"
                    " found, or crash",
                    remedy=f"pip install 'jax[{extra}]=={jax}'",
                )
            )
        else:
            findings.append(Finding(level="ok", what="plugin", text=f"{name} {version}"))
    if "libtpu" in installed:
        text = f"libtpu {installed['libtpu']}"
        findings.append(Finding(level="ok", what="plugin", text=text))
    has_gpu = pathlib.Path("/proc/driver/nvidia/version").exists()
    if has_gpu and not any("cuda" in name for name in plugins):
        findings.append(
            Finding(
                level="warning",
                what="plugin",
                text="this machine has an NVIDIA driver and JAX has no CUDA plugin: it will run"
                " on the CPU",
                remedy="pip install 'jaxmoe[cuda]'",
            )
        )
    if has_gpu and environment.get("JAX_PLATFORMS") == "cpu":
        findings.append(
            Finding(
                level="warning",
                what="plugin",
                text="JAX_PLATFORMS=cpu hides the GPU of this machine",
                remedy="unset JAX_PLATFORMS",
            )
        )
    return findings


def extras() -> list[Finding]:
    """Return the optional packages that are installed."""
    findings = []
    for extra, modules in EXTRAS.items():
        missing = [name for name in modules if importlib.util.find_spec(name) is None]
        if not missing:
            findings.append(Finding(level="ok", what="extra", text=f"{extra}: all there"))
            continue
        findings.append(
            Finding(
                level="problem" if extra in NEEDED else "ok",
                what="extra",
                text=f"{extra}: not installed: {', '.join(missing)}",
                remedy=f"pip install 'jaxmoe[{extra}]'"
                + ("" if extra in NEEDED else ", if it is wanted"),
            )
        )
    return findings


def variables(environment: Mapping[str, str]) -> list[Finding]:
    """Return the environment variables that change what XLA does."""
    findings = []
    names = ("JAX_PLATFORMS", "LIBTPU_INIT_ARGS", "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_FLAGS")
    shown = [f"{name}={environment[name]}" for name in names if environment.get(name)]
    text = ", ".join(shown) or "none is set"
    findings.append(Finding(level="ok", what="variables", text=text))
    flags = environment.get("XLA_FLAGS", "").split()
    if not flags:
        return findings
    if not flags[0].startswith("-"):
        if not os.path.exists(flags[0]):
            findings.append(
                Finding(
                    level="problem",
                    what="XLA_FLAGS",
                    text=f"XLA takes {flags[0]!r} for a file of flags, and there is none",
                    remedy="begin every flag with --",
                )
            )
        return findings
    keys = [flag.partition("=")[0] for flag in flags]
    if odd := [key for key in keys if not key.startswith("--")]:
        findings.append(
            Finding(
                level="problem",
                what="XLA_FLAGS",
                text=f"{', '.join(odd)}: XLA ends a process whose flags it does not know",
                remedy="begin every flag with --, without spaces around =",
            )
        )
    if twice := sorted({key for key in keys if keys.count(key) > 1}):
        findings.append(
            Finding(
                level="warning",
                what="XLA_FLAGS",
                text=f"{', '.join(twice)} is given twice; the last one counts",
                remedy="drop the others",
            )
        )
    return findings


def coordinator(environment: Mapping[str, str]) -> list[Finding]:
    """Return the address of the coordinator of a job."""
    address = environment.get("JAX_COORDINATOR_ADDRESS", "")
    counts = {
        name: environment[name]
        for name in ("JAX_NUM_PROCESSES", "SLURM_JOB_NUM_NODES", "SLURM_NTASKS")
        if environment.get(name, "").isdigit()
    }
    processes = max([1, *map(int, counts.values())])
    if not address:
        text = f"{processes} processes, by the cluster's own variables"
        text = text if processes > 1 else "one process: none is needed"
        return [Finding(level="ok", what="coordinator", text=text)]
    where = f"JAX_COORDINATOR_ADDRESS={address}"
    try:
        host, port = host_and_port(address)
    except ValueError:
        return [
            Finding(
                level="problem",
                what="coordinator",
                text=f"{where} is not host:port",
                remedy="give the first process's host name and a free port, such as node0:8476",
            )
        ]
    hosts = num_hosts(environment)
    if processes > 1 and is_loopback(host):
        return [
            Finding(
                level="problem" if hosts > 1 else "warning",
                what="coordinator",
                text=f"{where} is this very host, for {processes} processes: those on other hosts"
                " wait for themselves until they give up",
                remedy="give a name of the first process's host that the others can resolve"
                + ("" if hosts > 1 else ", unless all of them run here"),
            )
        ]
    try:
        socket.getaddrinfo(host, port)
    except OSError as error:
        return [
            Finding(
                level="problem",
                what="coordinator",
                text=f"{where} cannot be resolved ({error.strerror})",
                remedy="use an address that every host knows",
            )
        ]
    text = f"{where} for {processes} processes"
    return [Finding(level="ok", what="coordinator", text=text)]


def writable(directory: pathlib.Path, what: str) -> list[Finding]:
    """Check whether files can be written, and the free space.

    Args:
        directory: Directory, which need not exist and is not created.
        what: Name of the directory in the report.
    """
    existing = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
        free = shutil.disk_usage(existing).free
    except OSError as error:
        return [
            Finding(
                level="problem",
                what=what,
                text=f"{directory} cannot be written ({error.strerror})",
                remedy="choose another directory, or change its permissions",
            )
        ]
    text = f"{directory} is writable, {free / GIGABYTE:.1f} GB free"
    if free < 0.5 * GIGABYTE:
        return [Finding(level="problem", what=what, text=text, remedy="free some space")]
    if free < 5 * GIGABYTE:
        remedy = "free some: checkpoints of larger models will not fit"
        return [Finding(level="warning", what=what, text=text, remedy=remedy)]
    return [Finding(level="ok", what=what, text=text)]


def _installed() -> dict[str, str]:
    return dict(_distributions())


def _distributions() -> Iterator[tuple[str, str]]:
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]
        if name:
            yield name.lower().replace("_", "-"), distribution.version


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """Return the first three numbers of a version; plugins add a fourth for a rebuild."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])
