# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""What an entry point does to its process before the first contact with devices.

Never at import: a library user's process is his own.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys

import jax

from experiments.cli.output import write
from jaxmoe.disk import cache_directory
from sharding.distributed import start_processes

_MALLOPT = {-1: -1, -2: 64 * 2**20, -4: 0, -8: 1}
"""glibc's M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_ARENA_MAX.

XLA on the CPU frees its temporary buffer after every step; glibc would give it back to the kernel
and fetch it again page by page.
"""


def start_process(
    *,
    has_steps: bool = True,
    needs_devices: bool = True,
    start: int = 300,
    heartbeat: int = 100,
) -> None:
    """Logging, allocator, compilation cache, the other processes of the job, and the devices.

    Args:
        has_steps: the same is computed again and again; False for what should stay small.
        needs_devices: False leaves them to the caller.
        start: seconds within which all processes must have come.
        heartbeat: seconds of silence after which JAX ends the others.

    Raises:
        ValueError: the environment speaks of a job or of devices that are not there.
    """
    configure_logging()
    if has_steps and sys.platform == "linux" and not os.environ.get("MALLOC_ARENA_MAX"):
        keep_freed_memory()
    if getattr(jax.config, "jax_compilation_cache_dir", None) is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_directory() / "compilation"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)
    start_processes(initialization_timeout=start, heartbeat_timeout=heartbeat)
    if needs_devices:
        _find_devices()


def _find_devices() -> None:
    """The first contact with devices, in words where JAX_PLATFORMS names some that are not here."""
    try:
        jax.local_devices()
    except (RuntimeError, AssertionError) as error:  # of CUDA without a GPU JAX asserts
        asked = getattr(jax.config, "jax_platforms", None)
        reason = str(error).strip().partition(" (set ")[0] or "there is no such device here"
        raise ValueError(
            f"JAX_PLATFORMS={asked or ''} cannot be used: {reason.rstrip('.')}: set"
            " JAX_PLATFORMS=cpu, or unset it to take what there is"
        ) from error


def configure_logging() -> None:
    """Warnings on standard error, in words for a user."""
    logging.basicConfig(level=logging.WARNING)
    for handler in logging.root.handlers:
        # Importing Orbax has put one there (absl's), and a second basicConfig does nothing.
        if type(handler) is logging.StreamHandler:
            handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    messages = logging.getLogger("jaxmoe.messages")
    messages.setLevel(logging.INFO)
    messages.propagate = False
    messages.handlers = [_Printed()]
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax: we report its failures in words
    logging.getLogger("jax").setLevel(logging.ERROR)


class _Printed(logging.Handler):
    """Print messages of the library on standard output as they are."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one message."""
        write(record.getMessage())


def keep_freed_memory() -> bool:
    """Tells glibc to keep freed memory for the next step; False where there is no glibc."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return all(mallopt(option, value) == 1 for option, value in _MALLOPT.items())
