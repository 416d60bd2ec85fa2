# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Requests to train on another mesh: `resize.json` in a run directory, and what became of them.

    resize.json     {"mesh": {"data": 6}}, or devices to leave out: {"without": [6, 7]}; there
                    while the request waits for the run
    resizes.json    one object per request that the run has answered

Axes that a request does not name keep their sizes. Where it names none, `data` becomes the largest
size that fits the devices that stay. Global batch, rows, noise and all other fields of the run stay
as they are, so a size fits only if it divides the batch (and the arrays that are sharded over it).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from jaxmoe.configs import from_json, to_json
from jaxmoe.disk import replace_file
from jaxmoe.json_bounds import name_file, parse_record, read_record
from jaxmoe.json_bounds import read_text as bounded_text
from jaxmoe.run.config import PretrainConfig
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.plan import check_mesh, make_plan
from jaxmoe.training.accumulation import accumulation_of
from sharding.mesh import MeshConfig

_MOST = 1 << 16
"""Bytes of the largest request."""
_WAY_OUT = 'write an object such as {"mesh": {"data": 6}}, or remove the file'


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AxisSizes:
    """Sizes of mesh axes; None keeps the size."""

    replica: int | None = None
    """Copies of the model."""
    stage: int | None = None
    """Pipeline stages."""
    data: int | None = None
    """Devices that share the sequences of a batch."""
    expert: int | None = None
    """Devices that share the routed experts."""
    seq: int | None = None
    """Devices that share the positions of one sequence."""
    tensor: int | None = None
    """Devices that share the heads and hidden units of a layer."""

    def __post_init__(self):
        for axis, size in self.given.items():
            if size < 1:
                raise ValueError(f"mesh.{axis}={size} must be at least 1")

    @property
    def given(self) -> dict[str, int]:
        """Sizes that are not None, by axis."""
        sizes = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {axis: size for axis, size in sizes.items() if size is not None}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ResizeRequest:
    """Mesh on which a run is to go on."""

    mesh: AxisSizes = AxisSizes()
    """Sizes of the mesh axes that change."""
    without: tuple[int, ...] = ()
    """Ids of devices to leave out, such as a slow one."""
    name: str = ""
    """Name under which `resizes.json` records the request."""

    def __post_init__(self):
        if not self.mesh.given and not self.without:
            raise ValueError(
                "a resize changes nothing: give the size of an axis, such as mesh.data=6, or"
                " devices to leave out, such as without=7"
            )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Resized:
    """What became of a request."""

    name: str
    """Name of the request."""
    status: Literal["compiling", "done", "refused"]
    """compiling: the step is compiled while the run trains; done; or refused: the run goes on as
    it was."""
    step: int
    """Number of steps done when the status was recorded."""
    message: str
    """The outcome in words."""
    mesh: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Sizes of the new mesh, of the axes larger than 1."""
    devices: tuple[int, ...] = ()
    """Ids of its devices."""
    compile_seconds: float | None = None
    """Seconds of compilation, beside the training."""
    pause_seconds: float | None = None
    """Seconds from the last step on the old mesh to the first on the new one."""
    moved_bytes: int | None = None
    """Size of the state."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DevicePlace:
    """A device of the job."""

    id: int
    process: int = 0


def parse_request(text: str) -> ResizeRequest:
    """Return the request in the text of `resize.json`.

    Raises:
        ValueError: It is not JSON, or has other fields.
    """
    record = parse_record(text, dict, "resize.json", _WAY_OUT)
    empty = {"mesh": to_json(AxisSizes()), "without": [], "name": ""}
    mesh = record.get("mesh")
    if isinstance(mesh, dict):
        record["mesh"] = {**empty["mesh"], **mesh}
    return from_json(ResizeRequest, {**empty, **record})


def write_request(directory: RunDirectory, request: ResizeRequest) -> None:
    """Write `resize.json`, which the run reads at its next step border.

    Args:
        directory: Directory of the run.
        request: Mesh wanted.

    Raises:
        ValueError: Another request waits, or the file cannot be written.
    """
    if (waiting := read_text(directory)) is not None:
        raise ValueError(
            f"{directory.resize_file} holds a request that the run has not answered"
            f" ({waiting.strip()}): wait for it, or remove the file"
        )
    with directory.usable():
        replace_file(directory.resize_file, json.dumps(to_json(request)) + "\n")


def read_text(directory: RunDirectory) -> str | None:
    """Return the text of `resize.json`; None without a request, or if it cannot be read now.

    Raises:
        ValueError: It is no file with text, or too large.
    """
    with contextlib.suppress(OSError), name_file(directory.resize_file, _WAY_OUT):
        return bounded_text(directory.resize_file, max_bytes=_MOST)
    return None


def withdraw(directory: RunDirectory, name: str) -> None:
    """Remove a request that has not been answered, unless another has replaced it.

    Args:
        directory: Directory of the run.
        name: Name of the request.
    """
    with contextlib.suppress(ValueError, OSError):
        text = read_text(directory)
        if text is not None and parse_request(text).name == name:
            os.unlink(directory.resize_file)


def set_aside(directory: RunDirectory) -> pathlib.Path:
    """Rename a `resize.json` that cannot be read, whatever it is, and return its new path.

    Raises:
        OSError: It cannot be renamed.
    """
    names = (f"resize.refused-{number}.json" for number in itertools.count(1))
    paths = (directory.path / name for name in names)
    free = next(path for path in paths if not os.path.lexists(path))
    os.rename(directory.resize_file, free)
    return free


def read_resizes(directory: RunDirectory) -> list[dict[str, Any]]:
    """Return what became of the requests of all starts, as JSON; empty without any."""
    try:
        records = read_record(directory.resizes_file, list)
    except (OSError, ValueError):
        return []
    names = ("name", "status", "message")
    return [
        event
        for event in records
        if isinstance(event, dict) and all(isinstance(event.get(name), str) for name in names)
    ]


def record(directory: RunDirectory, event: Resized, answered: str | None) -> None:
    """Write an event to `resizes.json` in place of an earlier one of the same request.

    Args:
        directory: Held directory of the run.
        event: What became of the request.
        answered: Text of the request, which is removed unless another has replaced it; None keeps
            it.
    """
    events = read_resizes(directory)
    if events and events[-1]["status"] == "compiling":
        events.pop()
    directory.write_resizes([*events, dataclasses.asdict(event)])
    if answered is not None and read_text(directory) == answered:
        os.unlink(directory.resize_file)


def resolve(
    request: ResizeRequest,
    running: MeshConfig,
    places: Sequence[DevicePlace],
    check: Callable[[MeshConfig], None],
) -> tuple[MeshConfig, tuple[int, ...]]:
    """Return the mesh of a request and the ids of its devices, equally many of each process.

    Args:
        request: What was asked for.
        running: Mesh of the run, with every size filled in.
        places: All devices of the job.
        check: Raises ValueError for a mesh that the run cannot use.

    Raises:
        ValueError: The devices do not suffice, or the mesh does not fit; names the sizes that do.
    """
    ids = [place.id for place in places]
    if strange := sorted(set(request.without) - set(ids)):
        raise ValueError(
            f"without={','.join(map(str, strange))} names no device of this run: it has"
            f" {','.join(map(str, ids))}"
        )
    remaining = [place for place in places if place.id not in request.without]
    if missing := {place.process for place in places} - {place.process for place in remaining}:
        raise ValueError(
            f"process {min(missing)} keeps no device, and every process needs one: leave fewer out"
        )
    requested = request.mesh.given
    target = dataclasses.replace(running, **requested)
    if not requested:
        return fit_data(target, remaining, check)
    by_process = _by_process(remaining)
    try:
        chosen = _choose(target, by_process)
        check(target)
    except ValueError as error:
        sizes = _fitting(target, by_process, check)
        raise ValueError(f"{error}; {_words(sizes, len(remaining))}") from error
    return target, chosen


def fit_data(
    mesh: MeshConfig, places: Sequence[DevicePlace], check: Callable[[MeshConfig], None]
) -> tuple[MeshConfig, tuple[int, ...]]:
    """Return a mesh with the largest size of `data` that fits, and the ids of its devices.

    Args:
        mesh: Mesh, of which all sizes but that of data stay.
        places: Devices that may be used.
        check: Raises ValueError for a mesh that the run cannot use.

    Raises:
        ValueError: No size fits.
    """
    by_process = _by_process(places)
    if not (sizes := _fitting(mesh, by_process, check)):
        raise ValueError(
            f"no size of mesh.data fits {len(places)} devices of {len(by_process)} processes with"
            " the other axes and the batch of this run"
        )
    mesh = dataclasses.replace(mesh, data=sizes[-1])
    return mesh, _choose(mesh, by_process)


def check_resized(config: PretrainConfig, mesh: MeshConfig) -> None:
    """Raise ValueError if a run cannot go on with a mesh.

    Args:
        config: Configuration of the run.
        mesh: Mesh with every size filled in.
    """
    training = config.training
    batches = [("evaluation.batch_size", config.held_out_batch_size, 1)]
    for _, rows in training.batch_sizes.stages:
        number = accumulation_of(rows, training.batch_size, training.accumulation)
        batches.append(("training.batch_size", rows, number))
    for field, rows, accumulation in reversed(batches):
        if rows % (mesh.batch_shards * accumulation):
            micro = f" in {accumulation} micro-batches" * (accumulation > 1)
            raise ValueError(
                f"mesh.data={mesh.data} divides the rows of a batch among {mesh.batch_shards}"
                f" devices{micro}, and {field}={rows} stays, which is no multiple of"
                f" {mesh.batch_shards * accumulation}"
            )
    execution = dataclasses.replace(config.execution, mesh=mesh)
    plan = make_plan(dataclasses.replace(config, execution=execution))
    check_mesh(plan, execution, trains=True)


def _by_process(places: Sequence[DevicePlace]) -> dict[int, list[int]]:
    """Return the ids of the devices of each process."""
    devices: dict[int, list[int]] = {}
    for place in places:
        devices.setdefault(place.process, []).append(place.id)
    return devices


def _fitting(
    mesh: MeshConfig, devices: Mapping[int, Sequence[int]], check: Callable[[MeshConfig], None]
) -> list[int]:
    """Return the sizes of `data` that fit, from 1."""
    number = sum(map(len, devices.values()))
    num_other = math.prod(mesh.sizes) // mesh.data
    sizes = (dataclasses.replace(mesh, data=size) for size in range(1, number // num_other + 1))
    return [size.data for size in sizes if _fits(size, devices, check)]


def _fits(
    mesh: MeshConfig, devices: Mapping[int, Sequence[int]], check: Callable[[MeshConfig], None]
) -> bool:
    try:
        _choose(mesh, devices)
        check(mesh)
    except ValueError:
        return False
    return True


def _words(sizes: Sequence[int], devices: int) -> str:
    if not sizes:
        return f"no size of mesh.data fits {devices} devices with these other axes"
    return f"sizes of mesh.data that fit {devices} devices: {', '.join(map(str, sizes))}"


def _choose(mesh: MeshConfig, devices: Mapping[int, Sequence[int]]) -> tuple[int, ...]:
    """Return the ids of the first devices of each process, as many of each.

    Args:
        mesh: Mesh with every size filled in.
        devices: Ids of the devices of each process that may be used.
    """
    number = math.prod(mesh.sizes)
    counts = [len(ids) for ids in devices.values()]
    if number > sum(counts):
        text = " x ".join(f"{axis}={size}" for axis, size in mesh.by_axis.items() if size > 1)
        raise ValueError(f"the mesh ({text}) needs {number} devices, and {sum(counts)} are there")
    each, remainder = divmod(number, len(devices))
    if remainder or each > min(counts):
        raise ValueError(
            f"the {len(devices)} processes hold equal parts of a mesh, and {number} devices are not"
            f" as many of each (the first has {counts[0]}, the fewest are {min(counts)})"
        )
    return tuple(device for ids in devices.values() for device in ids[:each])
