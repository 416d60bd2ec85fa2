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
from jaxmoe.run.directory import PACKAGES
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


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the doctor's report."""

    level: Level
    what: str
    """Subject in one or two terms."""
    text: str
    """What was found."""
    remedy: str = ""
    """What to do about it."""


def in_words(finding: Finding) -> str:
    """Return a finding as a line, with its remedy."""
    remedy = f" -> {finding.remedy}" if finding.remedy else ""
    return f"{finding.level:<8} {finding.what:<18} {finding.text}{remedy}"


def examine_software(directory: pathlib.Path, environment: Mapping[str, str]) -> list[Finding]:
    """Run all checks of this module.

    Args:
        directory: Directory of runs.
        environment: Environment variables.
    """
    return [
        *python_version(),
        *package_versions(),
        *plugin_versions(_find_installed(), environment),
        *extras(),
        *variables(environment),
        *coordinator(environment),
        *writable(directory, "run directory"),
    ]


def python_version() -> Iterator[Finding]:
    """Python, and which jaxmoe it imports."""
    where = pathlib.Path(jaxmoe.__file__).resolve().parents[1]
    text = f"{platform.python_version()} at {sys.executable}, jaxmoe from {where}"
    yield Finding("ok", "python", text)


def package_versions() -> Iterator[Finding]:
    """Return the versions of the required packages."""
    versions = {name: _version(name) for name in (*PACKAGES, "jaxtyping")}
    missing = [name for name, version in versions.items() if version is None]
    text = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    yield Finding("ok", "packages", text)
    if missing:
        yield Finding(
            "problem",
            "packages",
            f"not installed: {', '.join(missing)}",
            f"pip install {' '.join(missing)}",
        )


def plugin_versions(
    installed: Mapping[str, str], environment: Mapping[str, str]
) -> Iterator[Finding]:
    """jaxlib and the backends' plugins, which have to fit jax.

    Args:
        installed: versions of all distributions by name.
        environment: the environment variables.
    """
    jax = installed.get("jax", "0")
    jaxlib = installed.get("jaxlib", "0")
    if _numbers(jaxlib) > _numbers(jax):
        yield Finding(
            "problem",
            "jaxlib",
            f"jaxlib {jaxlib} is newer than jax {jax}",
            f"pip install jax=={jaxlib} jaxlib=={jaxlib}",
        )
    elif _numbers(jaxlib) < _numbers(jax):
        yield Finding(
            "warning",
            "jaxlib",
            f"jaxlib {jaxlib} is older than jax {jax}",
            f"pip install jaxlib=={jax}",
        )
    plugins = {n: v for n, v in installed.items() if re.fullmatch(r"jax-.*-(plugin|pjrt)", n)}
    for name, version in sorted(plugins.items()):
        if _numbers(version) != _numbers(jaxlib):
            extra = name.removeprefix("jax-").rpartition("-")[0]
            remedy = f"pip install 'jax[{extra}]=={jax}'"
            if extra.startswith("rocm"):  # installed by the names of its packages
                remedy = f"pip install jax-{extra}-plugin=={jaxlib} jax-{extra}-pjrt=={jaxlib}"
            yield Finding(
                "problem",
                "plugin",
                f"{name} {version} does not fit jaxlib {jaxlib}: its devices are not"
                " found, or crash",
                remedy,
            )
        else:
            yield Finding("ok", "plugin", f"{name} {version}")
    if "libtpu" in installed:
        text = f"libtpu {installed['libtpu']}"
        yield Finding("ok", "plugin", text)
    has_gpu = False
    for vendor, driver, kind, remedy in _DRIVERS:
        has_driver = pathlib.Path(driver).exists()
        has_gpu |= has_driver
        if has_driver and not any(kind in name for name in plugins):
            yield Finding(
                "warning",
                "plugin",
                f"this machine has the driver of {vendor} and JAX has no {kind.upper()} plugin: it"
                " will run on the CPU",
                remedy,
            )
    if has_gpu and environment.get("JAX_PLATFORMS") == "cpu":
        yield Finding(
            "warning",
            "plugin",
            "JAX_PLATFORMS=cpu hides the GPU of this machine",
            "unset JAX_PLATFORMS",
        )


_DRIVERS = (
    ("NVIDIA", "/proc/driver/nvidia/version", "cuda", "pip install 'jaxmoe[cuda]'"),
    ("AMD", "/dev/kfd", "rocm", "pip install jax-rocm7-plugin jax-rocm7-pjrt, of jaxlib's version"),
)
"""Vendor, file of its driver, name of the plugin, and how it is installed."""


def extras() -> Iterator[Finding]:
    """Return the optional packages that are installed."""
    for extra, modules in EXTRAS.items():
        missing = [name for name in modules if importlib.util.find_spec(name) is None]
        if not missing:
            yield Finding("ok", "extra", f"{extra}: all there")
            continue
        yield Finding(
            "problem" if extra in NEEDED else "ok",
            "extra",
            f"{extra}: not installed: {', '.join(missing)}",
            f"pip install 'jaxmoe[{extra}]'" + ("" if extra in NEEDED else ", if it is wanted"),
        )


def variables(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Return the environment variables that change what XLA does."""
    names = ("JAX_PLATFORMS", "LIBTPU_INIT_ARGS", "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_FLAGS")
    shown = [f"{name}={environment[name]}" for name in names if environment.get(name)]
    text = ", ".join(shown) or "none is set"
    yield Finding("ok", "variables", text)
    if environment.get("ROCR_VISIBLE_DEVICES") and environment.get("HIP_VISIBLE_DEVICES"):
        yield Finding(
            "warning",
            "variables",
            "ROCR_VISIBLE_DEVICES and HIP_VISIBLE_DEVICES are set: the second counts among the GPUs"
            " that the first leaves, and may leave none",
            "unset HIP_VISIBLE_DEVICES",
        )
    flags = environment.get("XLA_FLAGS", "").split()
    if not flags:
        return
    if not flags[0].startswith("-"):
        if not os.path.exists(flags[0]):
            yield Finding(
                "problem",
                "XLA_FLAGS",
                f"XLA takes {flags[0]!r} for a file of flags, and there is none",
                "begin every flag with --",
            )
        return
    keys = [flag.partition("=")[0] for flag in flags]
    if odd := [key for key in keys if not key.startswith("--")]:
        yield Finding(
            "problem",
            "XLA_FLAGS",
            f"{', '.join(odd)}: XLA ends a process whose flags it does not know",
            "begin every flag with --, without spaces around =",
        )
    if twice := sorted({key for key in keys if keys.count(key) > 1}):
        yield Finding(
            "warning",
            "XLA_FLAGS",
            f"{', '.join(twice)} is given twice; the last one counts",
            "drop the others",
        )


def coordinator(environment: Mapping[str, str]) -> Iterator[Finding]:
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
        yield Finding("ok", "coordinator", text)
        return
    where = f"JAX_COORDINATOR_ADDRESS={address}"
    try:
        host, port = host_and_port(address)
    except ValueError:
        yield Finding(
            "problem",
            "coordinator",
            f"{where} is not host:port",
            "give the first process's host name and a free port, such as node0:8476",
        )
        return
    hosts = num_hosts(environment)
    if processes > 1 and is_loopback(host):
        yield Finding(
            "problem" if hosts > 1 else "warning",
            "coordinator",
            f"{where} is this very host, for {processes} processes: those on other hosts"
            " wait for themselves until they give up",
            "give a name of the first process's host that the others can resolve"
            + ("" if hosts > 1 else ", unless all of them run here"),
        )
        return
    try:
        socket.getaddrinfo(host, port)
    except OSError as error:
        yield Finding(
            "problem",
            "coordinator",
            f"{where} cannot be resolved ({error.strerror})",
            "use an address that every host knows",
        )
        return
    text = f"{where} for {processes} processes"
    yield Finding("ok", "coordinator", text)


def writable(directory: pathlib.Path, what: str) -> Iterator[Finding]:
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
        yield Finding(
            "problem",
            what,
            f"{directory} cannot be written ({error.strerror})",
            "choose another directory, or change its permissions",
        )
        return
    text = f"{directory} is writable, {free / GIGABYTE:.1f} GB free"
    if free < 0.5 * GIGABYTE:
        yield Finding("problem", what, text, "free some space")
        return
    if free < 5 * GIGABYTE:
        remedy = "free some: checkpoints of larger models will not fit"
        yield Finding("warning", what, text, remedy)
        return
    yield Finding("ok", what, text)


def _find_installed() -> dict[str, str]:
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
