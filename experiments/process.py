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

from jaxmoe.tracking.disk import cache_directory
from sharding.distributed import start_processes

_MALLOPT = {-1: -1, -2: 64 * 2**20, -4: 0, -8: 1}
"""glibc's M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_ARENA_MAX.

XLA on the CPU frees its temporary buffer after every step; glibc would give it back to the kernel
and fetch it again page by page.
"""


def start_process() -> None:
    """Logging, allocator, compilation cache, and the other processes of the job."""
    configure_logging()
    if sys.platform == "linux" and not os.environ.get("MALLOC_ARENA_MAX"):
        keep_freed_memory()
    if getattr(jax.config, "jax_compilation_cache_dir", None) is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_directory() / "compilation"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)
    start_processes()


def configure_logging() -> None:
    """Warnings on standard error, in words for a user."""
    logging.basicConfig(level=logging.WARNING)
    for handler in logging.root.handlers:
        # Importing Orbax has put one there (absl's), and a second basicConfig does nothing.
        if type(handler) is logging.StreamHandler:
            handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax: we report its failures in words
    logging.getLogger("jax").setLevel(logging.ERROR)


def keep_freed_memory() -> bool:
    """Tells glibc to keep freed memory for the next step; False where there is no glibc."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return all(mallopt(option, value) == 1 for option, value in _MALLOPT.items())
