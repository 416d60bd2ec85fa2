# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`RunDirectory`: paths, lease and configuration check of the directory of one run.

    runs/<experiment>/<name>/
        config.json        the config, resolved; a later start with another one raises
        environment.json   versions, devices, commit, command line of the latest start
        metrics.jsonl      one object per logged step
        tensorboard/       the same, for TensorBoard
        router.npz         load per step, layer and expert
        plots/             PNG files
        report.html        everything on one page, self-contained
        samples.txt        generated text
        checkpoints/       what a restart continues from
        tokenizer/         tokenizer.json and its companions, if the data has one
        partition.npz      centroids of the parts of the documents, with data.partition
        skipped.json       rows that rollbacks have skipped
        lineage.json       how the run was extended, or which run it began from
        bad_data/          the batches of refused steps, and results of jaxmoe replay
        goodput.jsonl      seconds of each start, by kind
        resize.json        a request for another mesh (jaxmoe resize); answers: resizes.json
        summary.json       the numbers of the finished (or stopped) run
        profile/           the trace of --profile.steps
        trials.jsonl       of a comparison: one object per finished trial
        traces/            of a comparison: routing traces by method
    run.lock           process and host that hold the directory
    run.lease          the same with its incarnation; run.heartbeat is renewed by the holder

The lease is in `jaxmoe/resilience/lease.py`. JSON files are replaced in one rename.

To add a file: an attribute of `RunDirectory` and a line above, in `jaxmoe/run/directory.py`.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from jaxmoe.checkpoint import LeaseLostError
from jaxmoe.configs import differences, from_json, to_json
from jaxmoe.disk import check_local, check_plain_files, remove_leftovers, replace_file
from jaxmoe.json_bounds import read_record
from jaxmoe.resilience.lease import FILES as LEASE_FILES
from jaxmoe.resilience.lease import Lease

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


Config = TypeVar("Config")


class _Path:
    """Path of a file of a run directory; of the class, relative to the directory."""

    def __init__(self, name: str):
        self._name = name

    def __get__(self, directory: RunDirectory | None, cls: type | None = None) -> pathlib.Path:
        return pathlib.Path(self._name) if directory is None else directory.path / self._name


class RunDirectory:
    """The files of one run.

    Args:
        path: The directory; relative to the working directory, or to the home directory after a
            first `~`. It is made by `acquire`.

    Raises:
        ValueError: The path is in an object store.
    """

    config_file = _Path("config.json")
    """Resolved configuration, as `jaxmoe.configs.to_json` writes it."""
    environment_file = _Path("environment.json")
    """Versions, devices, commit and command line of the latest start."""
    metrics_file = _Path("metrics.jsonl")
    """One JSON object per logged step."""
    router_file = _Path("router.npz")
    """Load per step, layer and expert."""
    plots_directory = _Path("plots")
    """PNG files."""
    report_file = _Path("report.html")
    """Self-contained page about the run."""
    samples_file = _Path("samples.txt")
    """Generated text."""
    checkpoints_directory = _Path("checkpoints")
    """One directory per saved step."""
    tokenizer_directory = _Path("tokenizer")
    """Copy of the tokenizer.json of the data, and its companions."""
    partition_file = _Path("partition.npz")
    """Centroids of the parts of the documents."""
    skipped_file = _Path("skipped.json")
    """Rows that rollbacks have skipped: [[step, rows], ...]."""
    lineage_file = _Path("lineage.json")
    """How the run was extended, or which run it began from: one object per event."""
    bad_data_directory = _Path("bad_data")
    """Batches of refused steps."""
    summary_file = _Path("summary.json")
    """Numbers of the finished or stopped run."""
    links_file = _Path("links.json")
    """Measured times of the links between devices."""
    goodput_file = _Path("goodput.jsonl")
    """Seconds that each start of the run spent, by kind."""
    resize_file = _Path("resize.json")
    """Request for another mesh, until the run has answered it."""
    resizes_file = _Path("resizes.json")
    """What became of each request for another mesh."""
    profile_directory = _Path("profile")
    """Trace of `--profile.steps`."""
    traces_directory = _Path("traces")
    """Routing traces by method, of a comparison."""
    trials_file = _Path("trials.jsonl")
    """One JSON object per finished trial of a comparison."""

    def __init__(self, path: str | os.PathLike[str]):
        check_local("run.directory", path)
        self.path = pathlib.Path(os.path.expanduser(path))
        self._lease: Lease | None = None

    def has_config(self) -> bool:
        """Return whether there is a run in the directory, finished or not.

        Raises:
            ValueError: The path cannot be used, such as one that is too long.
        """
        with self.usable():
            return self.config_file.exists()

    def check_free_of_runs(self) -> None:
        """Refuse a directory with a run, for commands that write their own `summary.json`.

        Raises:
            ValueError: The directory holds a run, whose summary would be lost.
        """
        if self.has_config():
            raise ValueError(
                f"run.directory={self.path} holds a run, whose summary.json would be lost: choose"
                " another directory with --run.directory"
            )

    def acquire(
        self,
        *,
        steal: bool = False,
        heartbeat: float = 10.0,
        on_lost: Callable[[], None] | None = None,
    ) -> None:
        """Create the directory and lease it until `release` or the end of the process.

        Args:
            steal: Whether to take it from a process that is alive.
            heartbeat: Seconds between heartbeats of the lease.
            on_lost: Called in another thread when another process has taken the directory.

        Raises:
            ValueError: The directory cannot be created or written, or another process holds it.
        """
        with self.usable():
            self.path.mkdir(parents=True, exist_ok=True)
            check_plain_files(self._files())
            lease = Lease(self.path, heartbeat=heartbeat, steal=steal, on_lost=on_lost)
            lease.acquire()
        self._lease = lease
        for place in (self.path, self.plots_directory, self.bad_data_directory):
            remove_leftovers(place)

    def _files(self) -> list[pathlib.Path]:
        """Return the files that a run reads and writes; a bad resize.json is refused by the run."""
        names = [name for name, path in vars(RunDirectory).items() if isinstance(path, _Path)]
        return [getattr(self, n) for n in names if n.endswith("_file") and n != "resize_file"]

    def fence(self) -> None:
        """Raise LeaseLostError, with the holder, unless this process holds the directory."""
        if self._lease is None:
            raise LeaseLostError(f"run.directory={self.path} is not held by this process")
        self._lease.fence()

    @property
    def is_lost(self) -> bool:
        """Whether another process has taken the directory, which this one held."""
        if self._lease is None:
            return False
        try:
            self._lease.fence()
        except LeaseLostError:
            return True
        except OSError:
            return False  # the holder cannot be read now
        return False

    def why_lost(self) -> str:
        """Return who holds the directory, which this process has lost."""
        try:
            self.fence()
        except (LeaseLostError, OSError) as error:
            return str(error)
        return f"run.directory={self.path} was held by another process for a while"

    def release(self) -> None:
        """Release the directory."""
        if self._lease is not None:
            self._lease.release()
            self._lease = None

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Create the directory and lease it within, for commands that write only their summary."""
        self.acquire()
        try:
            yield
        finally:
            self.release()

    def clear_lock(self) -> None:
        """Remove the files of the lease, before the directory is renamed."""
        for name in LEASE_FILES:
            (self.path / name).unlink(missing_ok=True)

    def check_config(
        self,
        config: Any,
        free: tuple[str, ...] = (),
        fixed: tuple[str, ...] = (),
        way_out: str = "",
        *,
        writes: bool = True,
    ) -> None:
        """Record the configuration of a new run; refuse another one for an old run.

        Args:
            config: Configuration of this start.
            free: Dotted paths, each with everything below it, that may change from start to start;
                the file then follows the new configuration.
            fixed: Dotted paths below those that may not change.
            way_out: Alternative to repeating the saved values, for the message.
            writes: False only refuses.

        Raises:
            ValueError: Another field differs; the message has one line per field.
        """
        config_json = to_json(config)
        if self.has_config():
            saved = self._read(self.config_file)
            if lines := differences(saved, config_json, free, fixed):
                raise ValueError(
                    f"run.directory={self.path} belongs to a run with another config:\n  "
                    + "\n  ".join(lines)
                    + "\nrepeat the saved values, or choose another directory with "
                    f"--run.directory{way_out}"
                )
            writes = writes and saved != config_json
        if writes:
            self._write(self.config_file, config_json)

    def load_config(self, cls: type[Config]) -> Config:
        """Return the configuration of the run in this directory.

        Args:
            cls: Class of the configuration.

        Raises:
            ValueError: There is no run, or its configuration does not fit `cls`.
        """
        saved = self.config_json()
        try:
            return from_json(cls, saved)
        except ValueError as error:
            raise ValueError(f"{self.config_file}: {error}") from error

    def config_json(self) -> dict[str, Any]:
        """Return config.json as it was written, by whichever version.

        Raises:
            ValueError: There is no run, or the file is damaged.
        """
        if not self.has_config():
            raise ValueError(
                f"run.directory={self.path} holds no run ({self.config_file.name} is missing):"
                " give the directory of a run"
            )
        return self._read(self.config_file)

    def summary(self) -> dict[str, Any] | None:
        """Return the content of `summary.json`; None while the run has not ended.

        Raises:
            ValueError: The file is damaged.
        """
        return self._read(self.summary_file) if self.summary_file.exists() else None

    def environment(self) -> dict[str, Any] | None:
        """Return the content of `environment.json`; None if there is none, or it is damaged."""
        with contextlib.suppress(OSError, ValueError):
            return read_record(self.environment_file, dict)
        return None

    def read_skipped(self) -> list[Any]:
        """Return the content of `skipped.json`; empty without a rollback; ValueError if damaged."""
        return self._read(self.skipped_file, list) if self.skipped_file.exists() else []

    def write_skipped(self, windows: list[list[int]]) -> None:
        """Write `skipped.json`; a ValueError if that is not possible.

        Args:
            windows: As `jaxmoe.data.SkippedRows.to_json` gives them.
        """
        self._write(self.skipped_file, windows)

    def lineage(self) -> list[Any]:
        """Return the content of `lineage.json`; empty for a new run; ValueError if damaged."""
        return self._read(self.lineage_file, list) if self.lineage_file.exists() else []

    def write_lineage(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Write `lineage.json`; a ValueError if that is not possible.

        Args:
            events: As `jaxmoe.run.provenance.lineage` makes them.
        """
        self._write(self.lineage_file, events)

    def write_resizes(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Write `resizes.json`; a ValueError if that is not possible.

        Args:
            events: As `jaxmoe.contrib.elastic.request` makes them.
        """
        self._write(self.resizes_file, events)

    def write_environment(
        self, devices: Sequence[str], compute: str | None = None, **more: Any
    ) -> None:
        """Record what this start runs on.

        Args:
            devices: Names of the devices.
            compute: Dtype of matrix products; None where nothing is multiplied.
            more: Further JSON values by name.

        Raises:
            ValueError: The file cannot be written.
        """
        self._write(self.environment_file, describe_environment(devices, compute, **more))

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write `summary.json`.

        Args:
            summary: Numbers and strings by name; NaN and infinity become null.

        Raises:
            ValueError: If the file cannot be written.
        """
        self._write(self.summary_file, _finite(summary))

    def _write(self, file: pathlib.Path, data: Any) -> None:
        with self.usable():
            if self._lease is not None:
                try:
                    self._lease.fence()
                except LeaseLostError as error:
                    raise ValueError(str(error)) from error
            replace_file(file, json.dumps(data, indent=2) + "\n")

    def _read(self, file: pathlib.Path, kind: type[dict] | type[list] = dict) -> Any:
        with self.usable():
            return read_record(file, kind)

    @contextlib.contextmanager
    def usable(self) -> Iterator[None]:
        """Turn errors of the operating system into ValueErrors that a user can act on."""
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                rule = "has no space left: free some"
            elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
                rule = "is not writable: change its permissions"
            elif error.errno == errno.EFBIG:
                rule = "needs a larger file than the limit of this process: see ulimit -f"
            elif error.errno == errno.ENAMETOOLONG:
                rule = "is longer than the file system allows: shorten it"
            else:
                rule = f"cannot be used ({error.strerror}: {error.filename}): mend it"
            raise ValueError(
                f"run.directory={self.path} {rule}, or choose another directory with "
                "--run.directory"
            ) from error


def _finite(value: Any) -> Any:
    """Return the value with null for NaN and infinity, which JSON lacks."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
