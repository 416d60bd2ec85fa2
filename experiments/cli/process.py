# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Sets up the process of a command before the first use of devices.

Called by commands only: the library changes nothing in the process of its user.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.metadata
import importlib.util
import logging
import mmap
import os
import pathlib
import signal
import sys

import jax

from experiments.cli.exit_codes import ExitCode
from experiments.cli.launcher import watch_launcher
from experiments.cli.output import write
from jaxmoe.disk import cache_directory
from jaxmoe.errors import printable
from jaxmoe.host_memory import return_memory
from sharding.distributed import start_processes

_MALLOPT = {-1: -1, -2: 64 * 2**20, -4: 0, -8: 1}
"""glibc's M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX, M_ARENA_MAX.

XLA on the CPU frees its temporary buffer after every step; by default glibc returns it to the
kernel and faults it in again page by page.
"""
_COMPILED = "/jax/core/compile/backend_compile_duration"
"""JAX's event at the end of a compilation."""
_LONG_COMPILATION = 1.0
"""Seconds of a compilation whose memory is worth returning."""


def start_process(
    *,
    has_steps: bool = True,
    needs_devices: bool = True,
    start: int = 300,
    heartbeat: int = 100,
) -> None:
    """Set up logging, allocator and compilation cache, join the other processes, find the devices.

    From then on the process stops when the launcher that started it has ended.

    Args:
        has_steps: Whether the same computation repeats; False keeps freed memory small.
        needs_devices: Whether to find the devices; False leaves them to the caller.
        start: Seconds within which all processes must join.
        heartbeat: Seconds of silence after which JAX ends the other processes.

    Raises:
        ValueError: The environment describes a job or devices that do not exist.
    """
    configure_logging()
    watch_launcher()
    check_xla_flags()
    if has_steps and sys.platform == "linux" and not os.environ.get("MALLOC_ARENA_MAX"):
        keep_freed_memory()
    if getattr(jax.config, "jax_compilation_cache_dir", None) is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_directory() / "compilation"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)
    _skip_absent_tpu()
    start_processes(initialization_timeout=start, heartbeat_timeout=heartbeat)
    if needs_devices:
        _find_devices()


def end_at_once(number: int) -> None:
    """End a server at a second signal, whatever it is doing."""
    os._exit(128 + number)


def end_unsaved(number: int) -> None:
    """End a run at a second signal, whatever it is doing.

    The exit code says that the last state was not saved; 130 would say that it was.

    Args:
        number: Number of the signal.
    """
    name = signal.Signals(number).name
    with contextlib.suppress(OSError):  # a terminal that is closed
        os.write(2, f"error: {name} came again: ended at once, without a save\n".encode())
    os._exit(ExitCode.NOT_SAVED)


def _find_devices() -> None:
    """Initialise the devices; explain a JAX_PLATFORMS that names missing ones."""
    try:
        jax.local_devices()
    except (RuntimeError, AssertionError) as error:  # JAX asserts for CUDA without a GPU
        platforms = getattr(jax.config, "jax_platforms", None)
        reason = str(error).strip().partition(" (set ")[0] or "there is no such device here"
        raise ValueError(
            f"JAX_PLATFORMS={platforms or ''} cannot be used: {reason.rstrip('.')}: set"
            " JAX_PLATFORMS=cpu, or unset it to take what there is"
        ) from error


def configure_logging() -> None:
    """Send warnings to standard error and messages of the library to standard output."""
    logging.basicConfig(level=logging.WARNING)
    for handler in logging.root.handlers:
        # Importing Orbax added absl's handler, after which basicConfig does nothing.
        if type(handler) is logging.StreamHandler:
            handler.setFormatter(_Words("%(levelname)s: %(message)s"))
    messages = logging.getLogger("jaxmoe.messages")
    messages.setLevel(logging.INFO)
    messages.propagate = False
    messages.handlers = [_Printed()]
    logging.getLogger("absl").setLevel(
        logging.CRITICAL
    )  # failures of Orbax are reported by the library
    logging.getLogger("jax").setLevel(logging.ERROR)


class _Words(logging.Formatter):
    """Escape control characters in messages: names of files may have them, and steer a terminal."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the line of a record, before any traceback."""
        return printable(super().formatMessage(record), kept="\n\t")


class _Printed(logging.Handler):
    """Print messages of the library on standard output, control characters escaped."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one message."""
        write(printable(record.getMessage(), kept="\n\t"))


@functools.cache
def keep_freed_memory() -> bool:
    """Make glibc keep freed memory for the next step; return False without glibc.

    What a compilation has freed, hundreds of megabytes, returns to the kernel: no step needs it.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    if not all(mallopt(option, value) == 1 for option, value in _MALLOPT.items()):
        return False
    jax.monitoring.register_event_duration_secs_listener(_end_compilation)
    return True


def _end_compilation(event: str, duration_secs: float, **kwargs: str | int) -> None:
    del kwargs
    if event == _COMPILED and duration_secs > _LONG_COMPILATION:
        return_memory()


_LIBRARY = "libjax_common.so"
"""File of jaxlib that holds XLA, and with it the names of all flags as text."""


def check_xla_flags() -> None:
    """Refuse an unknown flag in XLA_FLAGS; XLA aborts at one, when it first finds its devices.

    A known flag costs milliseconds. A name that is part of another text of the library passes, and
    a library that is not found passes every flag.

    Raises:
        ValueError: A flag is unknown.
    """
    flags = os.environ.get("XLA_FLAGS", "").split()
    if not flags or not flags[0].startswith("--"):
        return  # none, or the name of a file with flags
    package = importlib.util.find_spec("jaxlib")
    library = pathlib.Path((package and package.origin) or "").parent / _LIBRARY
    if not library.is_file():
        return
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        for word in flags:
            name = word.partition("=")[0].removeprefix("--")
            if word.startswith("--") and text.find(name.encode()) < 0:
                version = importlib.metadata.version("jaxlib")
                raise ValueError(
                    f"XLA_FLAGS has --{name}, which the XLA of jaxlib {version} does not know:"
                    " remove it (flags of the TPU compiler go to LIBTPU_INIT_ARGS)"
                )


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


def _skip_absent_tpu() -> None:
    """Leave libtpu out of the platforms if there is no TPU and the user has not chosen.

    libtpu is installed to compile ahead of time (extra [plan]). Where no TPU is, its start takes
    half a second and writes warnings to standard error, before JAX takes the next platform.
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
