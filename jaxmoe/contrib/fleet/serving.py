# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Starts a fleet over a trained run or a Hugging Face model, as `serve` asks for it."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

from jaxmoe.contrib.fleet.config import FleetConfig
from jaxmoe.contrib.fleet.dispatch import DispatchConfig, LeastLoadedDispatchConfig
from jaxmoe.contrib.fleet.endpoint import reshard_routes
from jaxmoe.contrib.fleet.engine import FleetEngine
from jaxmoe.contrib.fleet.executor import MeshExecutor
from jaxmoe.contrib.fleet.instances import device_groups, executors_on, reachable
from jaxmoe.contrib.fleet.layouts import MeshLayouts
from jaxmoe.contrib.fleet.scaling import FixedScalingConfig, ScalingConfig
from jaxmoe.contrib.fleet.timing import MeasuredSteps
from jaxmoe.run.serving import (
    Opened,
    ServedCheckpoint,
    ServerConfig,
    load_model,
    open_executor,
    served_by,
)
from jaxmoe.serve.backend import backend_of
from jaxmoe.serve.http.served import Served


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FleetSizesConfig(ServerConfig):
    """One or several instances of the model, whose meshes may change."""

    name: ClassVar[str] = "fleet"

    instances: int = 1
    """Instances of the model, each on devices of its own; all share the devices where there are
    enough for one only."""
    dispatch: DispatchConfig = LeastLoadedDispatchConfig()
    """Which instance answers a request, and what moves between them."""
    scaling: ScalingConfig = FixedScalingConfig()
    """How many instances take requests, and on how many devices each is."""

    def __post_init__(self):
        ServerConfig.__post_init__(self)
        if self.instances < 1:
            raise ValueError(f"engine.instances={self.instances} must be at least 1")
        roles = self.dispatch.roles(self.instances)
        self.scaling.check(roles=roles, lacks=("power", "objectives"))

    def open(self, checkpoint: ServedCheckpoint) -> Served:
        """Start an engine of all instances, which takes `POST /reshard`.

        Several instances have the same weights, each laid out by the mesh on devices of its own.
        """
        mesh = checkpoint.mesh
        groups = device_groups(self.instances, mesh)
        is_one = len(groups) == 1
        # Several instances take their weights from host memory.
        loaded = load_model(checkpoint if is_one else dataclasses.replace(checkpoint, mesh=None))
        backend = backend_of(loaded.model)
        if not backend.is_spread:
            self.refuse(
                ("instances", "dispatch", "scaling"),
                f"is of models that write from left to right, and this one has the backend"
                f" {backend.name}",
            )
        if checkpoint.adapters and not is_one:
            raise ValueError(
                f"adapters: several of them are served on one device, and engine.instances="
                f"{self.instances}: leave it out, or serve one folded run"
            )
        if is_one:
            opened = open_executor(loaded, self, kind=MeshExecutor)
            executors = [opened.executor]
        else:
            executors = executors_on(
                groups,
                loaded.model,
                loaded.params,
                loaded.router_state,
                config=backend.sizes(self, loaded.length),
                execution=loaded.assembly.execution,
                mesh=mesh,
            )
            opened = Opened(executors[0], backend.config(self), {})
        times = None
        if "hardware" in self.scaling.needs:
            times = MeasuredSteps.of(executors[0], math.prod(executors[0].mesh.sizes))
        engine = FleetEngine(
            executors,
            opened.config,
            fleet=FleetConfig(dispatch=self.dispatch, scaling=self.scaling),
            codec=loaded.codec,
            hardware=times,
            layouts=MeshLayouts(reachable(groups), times) if backend.is_spread else None,
        )
        served = served_by(engine, loaded, self, executors, opened.chats)
        return dataclasses.replace(served, routes=reshard_routes(engine))

    def describe(self) -> str:
        """Return a line about the instances; none about a single one that stays as it is."""
        if self.instances == 1 and not math.isfinite(self.scaling.seconds):
            return ""
        return (
            f"fleet    {self.instances} instances, dispatch {self.dispatch.name}, scaling"
            f" {self.scaling.name}\n"
        )
