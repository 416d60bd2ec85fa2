# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Keeps JAX from starting libtpu on a machine without a TPU.

libtpu is installed to compile ahead of time (extra [plan]). Where no TPU is, its start takes half a
second and writes warnings to standard error, before JAX takes the next platform.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import pathlib

import jax

_DEVICE_FILES = ("dev/accel*", "dev/vfio/[0-9]*")
_GOOGLE = "0x1ae0"
_NO_CHIPS = ("0x01", "0x02")
"""PCI classes of Google's disks and network cards."""
_EXPLICIT = ("TPU_ACCELERATOR_TYPE", "TPU_WORKER_HOSTNAMES", "TPU_NAME", "JAX_FORCE_TPU_INIT")
"""Variables whose presence leaves libtpu to the user."""
_QUIET = {"TPU_ACCELERATOR_TYPE": "v5litepod-1", "TPU_WORKER_HOSTNAMES": "localhost"}
"""Answers to what libtpu would ask of a metadata server."""


def has_tpu(root: pathlib.Path = pathlib.Path("/")) -> bool:
    """Return whether the machine may have a TPU; a doubtful device counts as one.

    Args:
        root: Root of the file system.
    """
    if any(True for pattern in _DEVICE_FILES for _ in root.glob(pattern)):
        return True
    for vendor in root.glob("sys/bus/pci/devices/*/vendor"):
        try:
            kind = (vendor.parent / "class").read_text().strip()
            if vendor.read_text().strip() == _GOOGLE and not kind.startswith(_NO_CHIPS):
                return True
        except OSError:  # an unreadable device may be a TPU
            return True
    return False


def skip_absent_tpu() -> None:
    """Leave libtpu out of the platforms if there is no TPU and the user has not chosen.

    Where another accelerator's plugin is installed, JAX keeps its own choice of platforms, and
    variables keep libtpu from searching.
    """
    if getattr(jax.config, "jax_platforms", None) or any(name in os.environ for name in _EXPLICIT):
        return
    if importlib.util.find_spec("libtpu") is None or has_tpu():
        return
    if importlib.metadata.entry_points(group="jax_plugins"):
        for name, value in _QUIET.items():
            os.environ.setdefault(name, value)
    else:
        jax.config.update("jax_platforms", "cpu")
