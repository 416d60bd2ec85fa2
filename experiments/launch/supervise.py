# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
r"""Starts the processes of a run on this host, and restarts them when one is lost.

    jaxmoe launch --supervise --processes 4 \
        --command "jaxmoe pretrain --run.directory runs/pretrain/four"

When one process of a run is killed, raises or hangs, the others wait for it in a collective. The
supervisor notices the end (or that all are silent), prints which process ended and why, ends the
others, and restarts all of them: the same command resumes from the newest checkpoint.

    restarted       a signal, a traceback, 69 a peer was lost, 74 not saved, 75 preempted after
                    saving, 124 hung, silence
    not restarted   0 done, 2 bad configuration, 3 diverged, 65 damaged, 76 corrupted,
                    77 taken over by another process, 130 Ctrl-C

A supervisor that is killed leaves no processes behind: those that jaxmoe's commands run notice it,
save and stop, and say so in their logs.

SIGTERM, SIGHUP and Ctrl-C are forwarded to all processes, which save and stop; a second one ends
them at once. The output of the first process is printed; the output of each is in
`--run.directory`, with a summary.json of every start.

With `--command "... --snapshots.every 10"` a restart continues from host memory, where
the supervisor keeps a directory for each process until the end.

With `--elastic shrink` a process that is lost twice in a row is left out: the rest go on with the
largest mesh.data that fits them and the batch, from the memory of the hosts, and after
`--elastic.retry` seconds the run is saved and all are tried again.

On several hosts, use the restarts of the cluster (`jaxmoe launch cluster:jobset`), or start a
supervisor on each with the same `--coordinator node0:8476` and `--num_processes`, and its own
`--first_process`: a lost process ends the others, and each host restarts its own.

`--exclude 3` leaves a process out whose device or link is slow (`--link_measurements.every`, or
`jaxmoe doctor --links`). Give the numbers of the whole job; when process 0 is left
out on another host, `--coordinator` must name the host of the first one that is started.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

from experiments.cli import flags
from experiments.cli.exit_codes import ExitCode
from experiments.cli.launcher import LauncherLife
from experiments.cli.output import write
from experiments.cli.process import configure_logging
from experiments.launch.config import SuperviseConfig
from experiments.launch.signals import Signals
from jaxmoe.resilience.shared_memory import SNAPSHOTS, memory_directories
from jaxmoe.run.directory import RunDirectory

FINAL = frozenset(
    {
        ExitCode.DONE,
        ExitCode.BAD_CONFIGURATION,
        ExitCode.DIVERGED,
        ExitCode.DAMAGED,
        ExitCode.CORRUPTED,
        ExitCode.TAKEN_OVER,
        ExitCode.INTERRUPTED,
    }
)
"""Exit codes after which a restart would end the same way, or is not wanted."""


@dataclasses.dataclass(frozen=True, slots=True)
class StartResult:
    """End of one start."""

    code: int
    """Exit code of the process that failed first; 128 + number for a signal."""
    cause: str
    """Cause and process, as text."""
    seconds: float
    process: int | None = None
    """Number in this start of the process that was lost; None if none was."""


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit code of the run."""
    prog = "jaxmoe launch --supervise"
    configure_logging()
    with flags.exit_on_bad_configuration():
        config = flags.parse_flags(SuperviseConfig(), argv, prog, __doc__ or "")
        directory = RunDirectory(config.run.directory or f"runs/launch/{config.run.name}")
        directory.check_free_of_runs()
        directory.acquire()
    if not config.here:
        write(f"supervisor: exclude={config.exclude} leaves no process of this host: nothing to do")
        directory.release()
        return int(ExitCode.DONE)
    with Signals() as signals:
        outcome = supervise(config, directory, signals)
    directory.release()
    return outcome.code


def supervise(
    config: SuperviseConfig,
    directory: RunDirectory,
    signals: Signals,
    *,
    name: str = "supervisor",
    environment: Mapping[str, str] | None = None,
    is_shown: bool = True,
    is_wanted: Callable[[], bool] = lambda: True,
) -> StartResult:
    """Start the processes until they end for good; return how.

    Args:
        config: Processes and limits of restarts.
        directory: Held directory of the logs and of summary.json.
        signals: Signals that are forwarded.
        name: Name in messages.
        environment: Variables of the processes beside those of this process.
        is_shown: Whether the output of the first process is printed.
        is_wanted: Returns whether a restart is of use.
    """
    starts: list[dict[str, Any]] = []
    restarts = 0
    places = config.elastic.build(len(config.here))
    with memory_directories(config.snapshots, config.here) as memory, LauncherLife() as life:
        while True:
            start = _SupervisedStart(
                config,
                directory.path,
                [memory[config.here[place]] for place in places.used],
                len(starts),
                signals,
                {**(environment or {}), **places.environment},
                is_shown,
                life,
            )
            outcome = start.wait(places.lasts)
            starts.append({**dataclasses.asdict(outcome), "processes": len(places.used)})
            is_final = outcome.code in FINAL or signals.number is not None
            change = "" if is_final else places.lost(outcome.process)
            if is_final and signals.number is None and places.note_refusal(outcome.code):
                is_final = False
                change = f"{len(places.used)} processes are tried"
            restarts = 0 if outcome.seconds >= config.steady else restarts
            may_restart = not is_final and restarts < config.max_restarts and is_wanted()
            directory.write_summary(
                {
                    "status": "running" if may_restart else "ended",
                    "command": config.command,
                    "processes": len(config.here),
                    "excluded": list(config.exclude),
                    "code": outcome.code,
                    "starts": starts,
                }
            )
            if not may_restart:
                break
            restarts += 1
            write(f"{name}: {outcome.cause}; start {len(starts) + 1} follows")
            if change:
                write(f"{name}: {change}")
    if outcome.code != ExitCode.DONE:
        write(f"{name}: {outcome.cause}; ended after {len(starts)} start{'s' * (len(starts) != 1)}")
    return outcome


class _SupervisedStart:
    """Processes of one start."""

    def __init__(
        self,
        config: SuperviseConfig,
        directory: pathlib.Path,
        memory: Sequence[pathlib.Path],
        start: int,
        signals: Signals,
        environment: Mapping[str, str],
        is_shown: bool,
        life: LauncherLife,
    ):
        self._config = config
        self._signals = signals
        self._is_shown = is_shown
        self._began = self._heard = time.monotonic()
        self._readers: list[threading.Thread] = []
        # `jaxmoe` is found beside this Python, in an environment that is not active, too.
        places = (os.environ.get("PATH", os.defpath), os.path.dirname(sys.executable))
        environment = {**os.environ, **environment, "PATH": os.pathsep.join(places)}
        total = config.num_started - len(config.here) + len(memory)
        if total > 1:
            environment |= {
                "JAX_COORDINATOR_ADDRESS": config.coordinator or f"127.0.0.1:{_free_port()}",
                "JAX_NUM_PROCESSES": str(total),
            }
        self._running: list[subprocess.Popen[str]] = []
        for index, own_memory in zip(config.here, memory, strict=False):
            log = directory / f"start{start + 1}-process{index}.log"
            variables = environment | {SNAPSHOTS: str(own_memory)} | life.environment(log)
            if total > 1:
                variables["JAX_PROCESS_ID"] = str(index)
            process = subprocess.Popen(
                shlex.split(config.command),
                env=variables,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                # A signal to the process group of the terminal comes once, from the supervisor.
                start_new_session=True,
                pass_fds=(life.descriptor,),
            )
            self._running.append(process)
            signals.add(process)
            reader = threading.Thread(
                target=self._read,
                args=(process, log, index),
                name=f"output of process {index}",
                daemon=True,
            )
            reader.start()
            self._readers.append(reader)

    def wait(self, seconds: float) -> StartResult:
        """Wait until all processes have ended, by themselves or because one was lost.

        Args:
            seconds: Time from now on after which they are asked to save and end.
        """
        deadline = time.monotonic() + seconds
        while True:
            if time.monotonic() > deadline:
                deadline = float("inf")
                for process in self._running:
                    process.send_signal(signal.SIGTERM)
            codes = [process.poll() for process in self._running]
            bad = {index: code for index, code in enumerate(codes) if code}
            if bad:
                return self._end(min(bad, key=lambda index: consequence(bad[index])))
            if all(code == 0 for code in codes):
                return self._ended(ExitCode.DONE, "done")
            silent = time.monotonic() - self._heard
            if silent > self._config.silence:
                self._stop(0)
                cause = f"no process has written anything for {silent:.0f} s: they hang"
                return self._ended(128 + signal.SIGKILL, cause)
            time.sleep(0.02)

    def _end(self, first: int) -> StartResult:
        """End the other processes after one failed; give them time if all received a signal."""
        killed = self._stop(self._config.grace) if self._signals.number is None else set()
        for process in self._running:
            process.wait()
        codes = {index: process.returncode for index, process in enumerate(self._running)}
        if (
            consequence(codes[first]) == _FOLLOWED
        ):  # the process that failed first may have ended since
            bad = [index for index, code in codes.items() if code and index not in killed]
            first = min(bad, key=lambda index: (consequence(codes[index]), index != first))
        code = codes[first]
        process = self._config.here[first]
        lost = None if code == ExitCode.PREEMPTED else first
        if code < 0:
            cause = f"process {process} was killed by {_name(-code)}"
            return self._ended(128 - code, cause, lost)
        names_of_codes = {int(member): member.name.lower().replace("_", " ") for member in ExitCode}
        reason = names_of_codes.get(code, "a traceback, see its log" if code == 1 else "unknown")
        return self._ended(code, f"process {process} ended with {code} ({reason})", lost)

    def _stop(self, grace: int) -> set[int]:
        """Wait until all have ended, kill those that have not, and return the killed ones."""
        until = time.monotonic() + grace
        killed = set[int]()
        for index, process in enumerate(self._running):
            while process.poll() is None and time.monotonic() < until:
                time.sleep(0.05)
            if process.poll() is None:
                process.kill()
                killed.add(index)
        return killed

    def _ended(self, code: int, cause: str, lost: int | None = None) -> StartResult:
        for process, reader in zip(self._running, self._readers, strict=True):
            process.wait()
            reader.join(timeout=5)
        self._signals.forget(self._running)
        return StartResult(int(code), cause, time.monotonic() - self._began, lost)

    def _read(self, process: subprocess.Popen[str], log: pathlib.Path, index: int) -> None:
        assert process.stdout is not None
        with process.stdout, log.open("w", encoding="utf-8") as file:
            for line in process.stdout:
                self._heard = time.monotonic()
                _append(file, line)
                if self._is_shown and index == self._config.here[0]:
                    write(line.rstrip("\n"))


_FOLLOWED = 3


def consequence(code: int) -> int:
    """Rank an exit code by how likely the process only followed the failure of another."""
    if code in FINAL:
        return 0
    if code == ExitCode.LOST:
        return _FOLLOWED
    if code < 0:
        return _FOLLOWED if code == -signal.SIGABRT else 1  # JAX aborts when a peer is lost
    return 2


def _append(file: TextIO, line: str) -> None:
    file.write(line)
    file.flush()


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
