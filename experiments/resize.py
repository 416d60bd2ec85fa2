# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Moves a training run to another mesh while it trains.

    jaxmoe resize --run.directory runs/pretrain/tiny --mesh.data 4
    jaxmoe resize --run.directory runs/pretrain/tiny --without 6 7

Writes resize.json into the run directory, after checking it, and waits for the run to answer. The
run compiles the step for the new mesh while it trains on, moves its state from the devices to the
devices, and goes on with the next batch; the global batch and its rows stay. Axes that are not
given keep their sizes; with `--without` alone, `data` becomes the largest size that fits the
devices that stay. A restart uses the mesh of its own command.
"""

from __future__ import annotations

import dataclasses
import functools
import time
import uuid
from collections.abc import Sequence
from typing import Any

from experiments.cli import flags
from experiments.cli.exit import run_command
from experiments.cli.exit_codes import ExitCode
from experiments.cli.output import write
from jaxmoe.contrib.elastic.request import (
    AxisSizes,
    DevicePlace,
    ResizeRequest,
    check_resized,
    read_resizes,
    resolve,
    withdraw,
    write_request,
)
from jaxmoe.resilience.lease import STALE, Beat, last_beat
from jaxmoe.run.config import PretrainConfig
from jaxmoe.run.directory import RunDirectory
from sharding.mesh import MeshConfig

_POLL_SECONDS = 0.2


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TrainingRunConfig:
    """Run that trains."""

    directory: str = "runs/pretrain/tiny"
    """Run directory."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ResizeConfig:
    """Run, and the mesh on which it is to go on."""

    run: TrainingRunConfig = TrainingRunConfig()
    """Run that trains."""
    mesh: AxisSizes = AxisSizes()
    """Sizes of the mesh axes that change."""
    without: tuple[int, ...] = ()
    """Ids of devices to leave out, such as a slow one."""
    wait: float = 600.0
    """Seconds to wait for the answer of the run; 0 returns when the request is written."""

    def __post_init__(self):
        if not self.wait >= 0:
            raise ValueError(f"wait={self.wait} must be 0 seconds or more")


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    prog = "jaxmoe resize"
    config = flags.parse_flags(ResizeConfig(), argv, prog, __doc__ or "")
    with flags.exit_on_bad_configuration():
        directory = RunDirectory(config.run.directory)
        request = ResizeRequest(
            mesh=config.mesh, without=config.without, name=f"resize-{uuid.uuid4().hex[:8]}"
        )
        mesh, devices = check_request(directory, request)
        beat = check_trains(directory)
        write_request(directory, request)
    sizes = " ".join(f"{axis}={size}" for axis, size in mesh.by_axis.items() if size > 1)
    write(f"requested: mesh {sizes or 'of one device'}, {len(devices)} devices")
    if not config.wait:
        return int(ExitCode.DONE)
    try:
        answer = wait_for_answer(directory, request.name, config.wait, beat)
    except RunEndedError as error:
        withdraw(directory, request.name)
        flags.fail(str(error))
    if answer is None:
        flags.fail(
            f"the run has not answered within {config.wait:g} s: {directory.resize_file} waits for"
            " it; a run reads it between two steps, also when it is started again"
        )
    if answer["status"] == "refused":
        flags.fail(answer["message"])
    write(answer["message"])
    return int(ExitCode.DONE)


def check_request(
    directory: RunDirectory, request: ResizeRequest
) -> tuple[MeshConfig, tuple[int, ...]]:
    """Return the mesh and the ids of the devices that a run will use, as far as its files show.

    Args:
        directory: Directory of the run.
        request: Mesh wanted.

    Raises:
        ValueError: There is no run, or it cannot use the mesh.
    """
    config = directory.load_config(PretrainConfig)
    if config.execution.precision.compute == "auto":  # would look for the devices, which are in use
        precision = dataclasses.replace(config.execution.precision, compute="float32")
        execution = dataclasses.replace(config.execution, precision=precision)
        config = dataclasses.replace(config, execution=execution)
    recorded = directory.environment() or {}
    if "mesh" not in recorded:
        raise ValueError(
            f"{directory.environment_file} does not name the devices of a run that trains: resume"
            " the run, and ask again"
        )
    try:
        names = [*recorded["devices"], *recorded.get("spare_devices", [])]
        ids = sorted(int(name.split()[0].partition(":")[2]) for name in names)
        mesh = MeshConfig(**recorded["mesh"])
    except (TypeError, KeyError, AttributeError, IndexError, ValueError) as error:
        raise ValueError(
            f"{directory.environment_file} does not name the devices of a run ({error!r}): restore"
            " it, or resume the run, which writes it anew"
        ) from error
    check = functools.partial(check_resized, config)
    return resolve(request, mesh, [DevicePlace(id=index) for index in ids], check)


def check_trains(directory: RunDirectory) -> Beat | None:
    """Return the last heartbeat of a run; None if no process trains it now.

    Args:
        directory: Directory of the run.

    Raises:
        ValueError: Its last step is done, and no process holds it: it would never answer.
    """
    summary = directory.summary() or {}
    beat = last_beat(directory.path)
    if summary.get("status") == "done" and beat is None:
        raise ValueError(
            f"run.directory={directory.path} has ended at step {summary.get('steps')}: there is"
            " nothing to resize; to train it further on another mesh, resume it with more steps and"
            " --execution.mesh.data"
        )
    return beat


class RunEndedError(Exception):
    """The run ended before it answered."""


def wait_for_answer(
    directory: RunDirectory, name: str, seconds: float, beat: Beat | None = None
) -> dict[str, Any] | None:
    """Return what became of a request; None if the run has not answered in time.

    Args:
        directory: Directory of the run.
        name: Name of the request.
        seconds: Timeout.
        beat: Last heartbeat before the request was written; None if the run did not train.

    Raises:
        RunEndedError: The run has trained since, and has ended without an answer.
    """
    until = time.monotonic() + seconds
    is_compiling = False
    has_trained = beat is not None
    heard = time.monotonic()
    while True:
        if (now := last_beat(directory.path)) != beat:
            beat = now
            heard = time.monotonic()
            has_trained = has_trained or beat is not None
        # Read after the sign of life: the last thing that a run does may be to answer.
        events = [event for event in read_resizes(directory) if event["name"] == name]
        if events and events[-1]["status"] != "compiling":
            return events[-1]
        if events and not is_compiling:
            write(events[-1]["message"])
            is_compiling = True
        silence = time.monotonic() - heard
        if has_trained and (beat is None or silence > STALE * beat.seconds):
            why = "has ended" if beat is None else f"has given no sign of life for {silence:.0f} s"
            raise RunEndedError(
                f"the run {why} without an answer, and the request is withdrawn; a start of the run"
                " uses the mesh of its own command"
            )
        if time.monotonic() > until:
            return None
        time.sleep(_POLL_SECONDS)


if __name__ == "__main__":
    run_command(main)
