# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""What a process that hashes sets before JAX starts, and what a file of hashes says about it."""

from __future__ import annotations

import os
import pathlib
import platform
import sys

ROOT = pathlib.Path(__file__).resolve().parents[3]
CACHE = ROOT / ".cache" / "jax-hashes"
FLAGS = (
    "--xla_force_host_platform_device_count=8",
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=60",
    "--xla_cpu_collective_call_terminate_timeout_seconds=180",
    "--xla_cpu_multi_thread_eigen=false",
    # Programs are small: compiling takes longer than computing.
    "--xla_backend_optimization_level=0",
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
)
_VARIABLES = {
    "JAX_PLATFORMS": "cpu",
    "NPROC": "32",  # as in tests/conftest.py
    "TF_CPP_MIN_LOG_LEVEL": "1",
    "JAX_NUMPY_DTYPE_PROMOTION": "strict",
    "JAX_NUMPY_RANK_PROMOTION": "raise",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}


def prepare(cache: pathlib.Path = CACHE) -> None:
    """Set the environment of this process and of those that it starts; JAX has not been imported.

    Args:
        cache: Directory of compiled programs.
    """
    if "jax" in sys.modules:
        raise RuntimeError("jax was imported before its flags could be set")
    os.environ.update(_VARIABLES, XLA_FLAGS=" ".join(FLAGS))
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(cache)


def describe() -> dict[str, str]:
    """Return what hashes depend on besides the source."""
    from importlib.metadata import version

    return {
        "flags": " ".join(FLAGS),
        "jax": version("jax"),
        "jaxlib": version("jaxlib"),
        "numpy": version("numpy"),
        "machine": platform.machine(),
        "python": platform.python_version(),
    }
