# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Lays the instances of an engine out on another mesh, one after the other, while they serve.

Programs of the new mesh are compiled in a thread of its own; an instance pauses for the copy of its
pages. One change goes on at a time, whether a policy or a command has asked for it.
"""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any, Protocol, runtime_checkable

from jaxmoe.errors import JaxmoeError

_THREAD = "jaxmoe-engine-resharding"


class BusyError(JaxmoeError, RuntimeError):
    """Another change of the mesh is going on."""


@runtime_checkable
class Layouts(Protocol):
    """Where instances may be; `jaxmoe.contrib.fleet.layouts.MeshLayouts` is one."""

    def check(self, number: int, executor: Any, mesh: Any) -> None:
        """Raise ValueError if an instance cannot have a mesh."""
        ...

    def laid_out(self, number: int, executor: Any, mesh: Any) -> Any:
        """Return an executor on a mesh, compiled, which can `adopt` the present one's pages."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Resharded:
    """What a change of the mesh of all instances has cost."""

    seconds: float
    """Time from the request to the end; requests are answered meanwhile."""
    pause_seconds: float
    """Longest time in which an instance has computed no step."""
    weight_bytes: int
    """Bytes of weights that devices received."""
    page_bytes: int
    """Bytes of pages that devices received."""


def _done(exchange: Future[Any]) -> Any:
    """Return what an exchange has cost, when it is done."""
    try:
        return exchange.result()
    except CancelledError as error:
        raise RuntimeError("the engine has ended before the change was done") from error


class Resharder:
    """Changes meshes; any thread may ask."""

    def __init__(
        self,
        layouts: Layouts | None,
        executors: Callable[[], Sequence[Any]],
        exchange: Callable[[Any, int], Future[Any]],
    ):
        """Make a thread for compilations.

        Args:
            layouts: Where instances may be; None refuses every change.
            executors: Returns the present executor of each instance.
            exchange: Lets an instance go on with another executor, as `FleetEngine.exchange`.
        """
        self._layouts = layouts
        self._executors = executors
        self._exchange = exchange
        self._lock = threading.Lock()
        self._running: Future[Resharded] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=_THREAD)

    @property
    def mesh(self) -> Any:
        """Mesh of the smallest instance; they differ only where a change has failed half-way."""
        return min(
            (executor.mesh for executor in self._executors()),
            key=lambda mesh: math.prod(mesh.sizes),
        )

    @property
    def most_chips(self) -> int:
        """Devices of an instance after doubling them as often as its mesh can."""
        number = math.prod(self.mesh.sizes)
        try:
            while True:
                self.check(self.of_size(2 * number))
                number *= 2
        except ValueError:
            return number

    def of_size(self, num_chips: int) -> Any:
        """Return the mesh of a number of devices: experts over as many as the other axes leave.

        Args:
            num_chips: Devices of an instance.
        """
        mesh = self.mesh
        num_other = math.prod(mesh.sizes) // mesh.expert
        return dataclasses.replace(mesh, expert=max(num_chips // num_other, 1))

    def is_on(self, mesh: Any) -> bool:
        """Return whether all instances have a mesh."""
        return all(executor.mesh == mesh for executor in self._executors())

    def with_sizes(self, sizes: Mapping[str, int]) -> Any:
        """Return the present mesh with some axes of other sizes.

        Args:
            sizes: Size of each axis that changes.

        Raises:
            ValueError: The engine cannot change its mesh.
        """
        self._require_layouts()
        return dataclasses.replace(self.mesh, **sizes)

    def check(self, mesh: Any) -> None:
        """Raise if an instance cannot have a mesh.

        Args:
            mesh: `MeshConfig` of each instance.

        Raises:
            ValueError: Says why, and the way out.
        """
        layouts = self._require_layouts()
        for number, executor in enumerate(self._executors()):
            layouts.check(number, executor, mesh)

    def begin(self, mesh: Any) -> Future[Resharded]:
        """Begin a change of all instances that have another mesh.

        Args:
            mesh: `MeshConfig` of each instance.

        Returns:
            What it has cost, when it is done; or its error, after which instances whose change is
            not done are as they were.

        Raises:
            ValueError: An instance cannot have the mesh.
            BusyError: A change is going on.
        """
        self.check(mesh)
        with self._lock:
            if self._running is not None and not self._running.done():
                raise BusyError("another change of the mesh is going on: try again when it is done")
            self._running = self._thread.submit(self._change, mesh)
            return self._running

    def close(self) -> None:
        """End the thread, after what it compiles."""
        self._thread.shutdown()

    def _require_layouts(self) -> Layouts:
        if self._layouts is None:
            raise ValueError(
                "the mesh of this engine is fixed: in Python give it layouts, as MeshLayouts; rows"
                " of masked diffusion stay on one device"
            )
        return self._layouts

    def _change(self, mesh: Any) -> Resharded:
        start_time = time.perf_counter()
        numbers = range(len(self._executors()))
        try:
            moved = [self._move(number, mesh) for number in numbers]
        except (RuntimeError, ValueError) as error:
            # Frames of the traceback hold the weights of the executor that was not made.
            raise error.with_traceback(None) from None
        changed = [result for result in moved if result is not None]
        return Resharded(
            seconds=time.perf_counter() - start_time,
            pause_seconds=max((result.seconds for result in changed), default=0.0),
            weight_bytes=sum(result.weight_bytes for result in changed),
            page_bytes=sum(result.page_bytes for result in changed),
        )

    def _move(self, number: int, mesh: Any) -> Any:
        """Change one instance; return what it has cost, None if it has the mesh already."""
        executor = self._executors()[number]
        if executor.mesh == mesh:
            return None
        laid_out = self._require_layouts().laid_out(number, executor, mesh)
        return _done(self._exchange(laid_out, number))
