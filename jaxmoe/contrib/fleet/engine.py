# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Answers requests with several instances of a model, behind the interface of `Engine`.

FleetEngine([first, second], fleet=FleetConfig(dispatch=LlumnixConfig()))       # two executors
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from jaxmoe.contrib.fleet.config import FleetConfig
from jaxmoe.contrib.fleet.members import FleetMembers, FleetParts
from jaxmoe.contrib.fleet.resharding import Layouts, Resharder
from jaxmoe.generation.text_stream import TextCodec
from jaxmoe.serve.backend import Executor
from jaxmoe.serve.config import InstancesConfig
from jaxmoe.serve.engine import Engine


class FleetEngine(Engine):
    """Serves several instances until it is closed; their meshes may change."""

    def __init__(
        self,
        executors: Sequence[Executor],
        config: InstancesConfig | None = None,
        *,
        fleet: FleetConfig | None = None,
        codec: TextCodec | None = None,
        clock: Callable[[], float] = time.monotonic,
        hardware: Any = None,
        layouts: Layouts | None = None,
    ):
        """Start the threads.

        Args:
            executors: Executor of each instance, all with the same model.
            config: Queue, and what an instance computes; `EngineConfig` when None.
            fleet: Placement of requests, and scaling; defaults when None.
            codec: Decoder of tokens, for text and stop strings; None serves tokens alone.
            clock: Seconds for the policies.
            hardware: Times of a step, such as `MeasuredSteps`, for a scaling policy that asks.
            layouts: Meshes that instances may have, such as `MeshLayouts`; None keeps them.

        Raises:
            ValueError: A policy needs what the executors lack, or other instances; or executors
                differ in their sizes.
        """
        self._exchanges: set[Future[Any]] = set()
        self.fleet = fleet or FleetConfig()
        self._parts = FleetParts(
            executors=executors, fleet=self.fleet, hardware=hardware, layouts=layouts
        )
        super().__init__(executors[0], config, codec=codec, clock=clock)

    def _start_members(
        self, executor: Executor, config: InstancesConfig, clock: Callable[[], float]
    ) -> FleetMembers:
        del executor  # the first of all
        self._fleet_members = FleetMembers(
            self._parts,
            config,
            clock=clock,
            post=self._inbox.put,
            publish=self._publish,
            exchange=self.exchange,
        )
        return self._fleet_members

    def __enter__(self) -> FleetEngine:
        return self

    def exchange(self, executor: Any, number: int = 0) -> Future[Any]:
        """Go on with another executor of the model, between two steps; sequences stay.

        Args:
            executor: Executor with a method `adopt` that takes over the pages of the present one,
                such as `MeshExecutor.on_mesh` returns it, compiled while this one serves.
            number: Instance.

        Returns:
            What `adopt` returns, when the change is done; or its error: then nothing has changed.
            It is cancelled when the engine ends before.

        Raises:
            ValueError: There is no such instance.
        """
        if not 0 <= number < len(self._members.all):
            raise ValueError(
                f"number={number} must be that of an instance, 0 to {len(self._members.all) - 1}"
            )
        done: Future[Any] = Future()
        self._exchanges.add(done)
        done.add_done_callback(self._exchanges.discard)
        self._inbox.put(lambda: self._fleet_members.exchange(number, executor, done))
        if self._serving.done():
            done.cancel()
        return done

    @property
    def resharder(self) -> Resharder:
        """Lays all instances out on another mesh while they serve."""
        return self._fleet_members.resharder

    def _end_all(self, serving: Future[None]) -> None:
        """End what is left: exchanges, and streams when the thread has failed."""
        for exchange in [*self._exchanges]:
            exchange.cancel()
        super()._end_all(serving)
