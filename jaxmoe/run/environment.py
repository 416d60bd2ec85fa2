# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Describes versions, devices, commit and command line, for environment.json."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import pathlib
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "chex", "numpy")
VARIABLES = ("JAX_PLATFORMS", "XLA_FLAGS", "LIBTPU_INIT_ARGS")
"""Environment variables that change what a run computes; no others are recorded."""


def describe_environment(
    devices: Sequence[str], compute: str | None = None, **more: Any
) -> dict[str, Any]:
    """Return what this start runs on, as JSON.

    Args:
        devices: Names of the devices.
        compute: Dtype of matrix products; None where nothing is multiplied.
        more: Further JSON values by name.
    """
    return {
        "started": _now(),
        "command": shlex.join(sys.orig_argv),
        "working_directory": os.getcwd(),
        "host": platform.node(),
        "platform": platform.platform(),
        "processors": os.cpu_count(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "devices": list(devices),
        **({} if compute is None else {"compute": compute}),
        **more,
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "commit": _commit(),
    }


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Return the commit of the checkout, with `+changes` if files differ; None outside of one."""
    root = pathlib.Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        run = ["git", "-C", str(root), "describe", "--always", "--abbrev=40", "--exclude=*"]
        described = subprocess.run(
            [*run, "--dirty=+changes"], capture_output=True, text=True, check=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return described.stdout.strip()
