# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Moves a run to another mesh of the same processes while it trains.

    read       resize.json, by process 0 at a step border; the text goes to all processes
    compile    the step of the new mesh, in a thread beside the training
    end        the loop, at the first border at which the programs of all processes are there
    move       the state, from the devices to the devices
    go on      with the next batch, in parts for the new mesh

A request that cannot be met is refused in words, and the run goes on as it was. With several
processes a border is every `tracking.print_every` steps. A restart uses the mesh of its command.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal

import jax
import numpy as np

from jaxmoe.contrib.elastic.move import check_movable, check_shapes, move_state
from jaxmoe.contrib.elastic.request import (
    DevicePlace,
    Resized,
    ResizeRequest,
    check_resized,
    parse_request,
    read_text,
    record,
    resolve,
    set_aside,
)
from jaxmoe.contrib.survival.recovery import with_raised_rate
from jaxmoe.messages import say
from jaxmoe.planning.attached import memory_warning
from jaxmoe.run.assemble import Assembly, assemble, describe_mesh
from jaxmoe.run.compile import CompiledStep, compile_steps
from jaxmoe.run.config import PretrainConfig
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.parts import ConfiguredPart, Moved
from jaxmoe.run.prepare import record_devices
from jaxmoe.run.supervision import Supervision, Watches
from jaxmoe.state_tree import shapes_of
from jaxmoe.training.state import TrainState
from sharding.distributed import agree, share

logger = logging.getLogger(__name__)

_READY, _RUNNING, _REFUSED = range(3)
_POLL_SECONDS = 0.5
"""Seconds between two looks for a request."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreparedMove:
    """A mesh on which a run can go on."""

    request: ResizeRequest
    assembly: Assembly
    compiled: CompiledStep
    target: TrainState
    """Shapes and shardings of the state."""
    first_step: int
    """Steps done before the first that the programs can compute."""
    compile_seconds: float
    warning: str
    """Reason why the step will probably not fit the devices; empty if it fits."""


class Resizing(ConfiguredPart):
    """Ends the loop when the mesh that a request names is ready, and moves the run there."""

    def __init__(self, config: PretrainConfig, directory: RunDirectory, supervision: Supervision):
        super().__init__(config, directory, supervision)
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="resize")
        self._assembly: Assembly | None = None
        self._step = 0
        self._shapes: TrainState | None = None
        self._text = ""
        self._preparing: Future[PreparedMove] | None = None
        self._looked = -_POLL_SECONDS
        self._moved: tuple[Resized, float] | None = None
        self.done: list[Resized] = []
        """Resizes of this start."""

    def begin(self, assembly: Assembly, step: int, state: TrainState, watches: Watches) -> None:
        """Keep the shapes of the state of a loop; record the resize that led to it, if one did."""
        self._assembly = assembly
        self._step = step
        self._shapes = shapes_of(state)
        if self._moved is None:
            return
        event, since = self._moved
        self._moved = None
        pause = time.perf_counter() - since
        event = dataclasses.replace(
            event, pause_seconds=pause, message=f"{event.message}, pause {pause:.2f} s"
        )
        self._record(event, is_answer=True)
        self.done.append(event)
        watches.reporter.log_numbers(
            event.step, {"mesh/devices": len(event.devices), "mesh/pause_seconds": pause}
        )
        say(event.message)

    def event(self) -> Literal["resized"] | None:
        """Return whether all processes have the programs of another mesh."""
        if self._preparing is None:
            self._look()
            return None
        future = self._preparing
        code = _RUNNING
        if future.done():
            code = _READY if future.exception() is None else _REFUSED
        worst = agree(code)
        if worst == _READY:
            return "resized"
        if worst == _REFUSED and not agree(not future.done()):
            self._preparing = None
            self._refuse(future.exception())
        return None

    def move(self, leaves: list[Any], step: int) -> Moved | None:
        """Return the run on its new mesh; the devices hold one state and an array meanwhile."""
        since = time.perf_counter()
        if self._preparing is None:
            return None
        assert self._assembly is not None  # the loop has begun
        ready = self._preparing.result()
        self._preparing = None
        if ready.warning:
            logger.warning("%s", ready.warning)
        # A rollback meanwhile may have changed the data that follow, or gone back further.
        assembly = dataclasses.replace(ready.assembly, loader=self._assembly.loader)
        compiled = ready.compiled
        if step < ready.first_step:
            compiled = compile_steps(assembly, step, ready.target)
        size = sum(leaf.nbytes for leaf in leaves)
        state = move_state(leaves, ready.target)
        devices = tuple(device.id for device in assembly.mesh.devices.flat)
        shown = " ".join(f"{axis}={n}" for axis, n in describe_mesh(assembly.mesh).items())
        event = Resized(
            name=ready.request.name,
            status="done",
            step=step,
            message=f"resized at step {step}: {assembly.mesh.size} of {jax.device_count()} devices,"
            f" mesh {shown}; compiled in {ready.compile_seconds:.1f} s beside the training,"
            f" {size / 1e6:.1f} MB moved",
            mesh=describe_mesh(assembly.mesh),
            devices=devices,
            compile_seconds=ready.compile_seconds,
            moved_bytes=size,
        )
        self._moved = event, since
        if jax.process_index() == 0:
            record_devices(self.directory, assembly)
        return Moved(assembly=assembly, compiled=compiled, state=state)

    def rows(self) -> Mapping[str, Any]:
        """Return the resizes of this start."""
        return {"resizes": [dataclasses.asdict(event) for event in self.done]}

    def close(self) -> None:
        """Give a compilation up that nothing waits for any more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _look(self) -> None:
        """Begin to prepare the requested mesh, if there is a request."""
        text = None
        is_first = jax.process_index() == 0
        if is_first and time.monotonic() - self._looked >= _POLL_SECONDS:
            self._looked = time.monotonic()
            text = self._read()
        if not agree(bool(text)):
            return
        sent = share(np.frombuffer((text or "").encode(), np.uint8), is_first)
        self._text = sent.tobytes().decode()
        assert self._assembly is not None and self._shapes is not None  # the loop has begun
        self._preparing = self._threads.submit(
            prepare_mesh, self._text, self._assembly, self._step, self._shapes
        )
        self._record(
            Resized(
                name=_name_in(self._text),
                status="compiling",
                step=self._step,
                message="the step is compiled for the new mesh while the run trains",
            ),
            is_answer=False,
        )

    def end(self, step: int, status: str) -> None:
        """Refuse a request that came too late, once the run has done its last step."""
        if status != "done" or jax.process_index() != 0 or not (text := self._read()):
            return
        self._text = text
        message = f"the run has ended at step {step}: nothing is resized"
        event = Resized(name=_name_in(text), status="refused", step=step, message=message)
        self._record(event, is_answer=True)

    def _read(self) -> str | None:
        """Return the text of a request; one that is none is recorded and set aside."""
        try:
            if text := read_text(self.directory):
                parse_request(text)
            return text
        except ValueError as error:
            message = str(error)
        try:
            message += f"; it is set aside as {set_aside(self.directory).name}"
        except OSError as error:
            self._looked = math.inf  # or each look would warn
            message += f"; it cannot be set aside ({error.strerror}), and the run looks no more"
        logger.warning("the resize is refused, and the run goes on as it was: %s", message)
        event = Resized(name="", status="refused", step=self._step, message=message)
        self._record(event, is_answer=False)
        return None

    def _refuse(self, error: BaseException | None) -> None:
        """Record the reason of a refusal.

        Raises:
            BaseException: The error, if no request can cause it.
        """
        if error is not None and not isinstance(error, ValueError | RuntimeError):
            raise error
        message = str(error or "another process cannot use the mesh, see its log")
        logger.warning("the resize is refused, and the run goes on as it was: %s", message)
        event = Resized(
            name=_name_in(self._text), status="refused", step=self._step, message=message
        )
        self._record(event, is_answer=True)

    def _record(self, event: Resized, *, is_answer: bool) -> None:
        """Write an event; a file that cannot be written is a warning."""
        if jax.process_index() != 0:
            return
        try:
            record(self.directory, event, self._text if is_answer else None)
        except (OSError, ValueError) as error:
            logger.warning("%s", error)


def prepare_mesh(text: str, running: Assembly, step: int, shapes: TrainState) -> PreparedMove:
    """Return the mesh of a request with its compiled step; nothing of the run changes.

    Args:
        text: Text of `resize.json`.
        running: Plan, devices and data of the run.
        step: Number of steps done before those that the programs compute.
        shapes: Shapes and shardings of the state.

    Raises:
        ValueError: The run cannot go on with this mesh.
    """
    request = parse_request(text)
    config = running.plan.config
    check_movable(running)
    places = [DevicePlace(id=device.id, process=device.process_index) for device in jax.devices()]
    mesh, ids = resolve(
        request, running.execution.mesh, places, functools.partial(check_resized, config)
    )
    devices = [device for device in jax.devices() if device.id in ids]
    execution = dataclasses.replace(config.execution, mesh=mesh)
    config = dataclasses.replace(config, execution=execution)
    assembly = assemble(config, trains=True, source=running.source, devices=devices)
    assembly = with_raised_rate(assembly, running.plan.raised)
    if assembly.mesh == running.mesh:
        raise ValueError(f"the run is on this mesh already: devices {','.join(map(str, ids))}")
    target = assembly.state_shapes()
    check_shapes(shapes, target)
    began = time.perf_counter()
    compiled = compile_steps(assembly, step, target)
    local = [device for device in devices if device.process_index == jax.process_index()]
    return PreparedMove(
        request=request,
        assembly=assembly,
        compiled=compiled,
        target=target,
        first_step=step,
        compile_seconds=time.perf_counter() - began,
        warning=memory_warning(assembly.plan.step_plan(assembly.execution), local),
    )


def _name_in(text: str) -> str:
    try:
        return parse_request(text).name
    except ValueError:
        return ""
