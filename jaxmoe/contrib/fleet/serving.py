# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Starts a fleet over a trained run or a Hugging Face model, as `serve` asks for it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from jaxmoe.contrib.fleet.config import FleetConfig
from jaxmoe.contrib.fleet.dispatch import DispatchConfig, LeastLoadedDispatchConfig
from jaxmoe.contrib.fleet.endpoint import reshard_routes
from jaxmoe.contrib.fleet.engine import FleetEngine
from jaxmoe.contrib.fleet.executor import MeshExecutor
from jaxmoe.contrib.fleet.instances import device_groups, executors_on, reachable
from jaxmoe.contrib.fleet.layouts import MeshLayouts
from jaxmoe.contrib.fleet.scaling import FixedScalingConfig, ScalingConfig
from jaxmoe.contrib.fleet.timing import MeasuredSteps
from jaxmoe.data.chat import TemplateName
from jaxmoe.run.provenance.saved import Ends
from jaxmoe.run.serving import Opened, load_model, open_executor, served_by
from jaxmoe.serve.backend import backend_of
from jaxmoe.serve.http.served import Served
from jaxmoe.serve.sizes import EngineSizesConfig
from sharding.mesh import MeshConfig


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FleetSizesConfig(EngineSizesConfig):
    """Sizes of an engine of one or several instances."""

    instances: int = 1
    """Instances of the model, each on devices of its own; all share the devices where there are
    enough for one only."""
    dispatch: DispatchConfig = LeastLoadedDispatchConfig()
    """Which instance answers a request, and what moves between them."""
    scaling: ScalingConfig = FixedScalingConfig()
    """How many instances take requests, and on how many devices each is."""

    def __post_init__(self):
        EngineSizesConfig.__post_init__(self)
        if self.instances < 1:
            raise ValueError(f"engine.instances={self.instances} must be at least 1")
        roles = self.dispatch.roles(self.instances)
        self.scaling.check(roles=roles, has_power=False, has_objectives=False)


def open_fleet(
    path: str,
    sizes: FleetSizesConfig,
    *,
    step: int | None = None,
    mesh: MeshConfig | None = None,
    initial: str | None = None,
    name: str | None = None,
    template: TemplateName | None = None,
    eos: Ends = "auto",
    adapters: Mapping[str, str] | None = None,
) -> Served:
    """Read a checkpoint, compile the steps and start an engine; the caller closes it.

    Several instances have the same weights, each laid out by the mesh on devices of its own. The
    server takes `POST /reshard`.

    Args:
        path: Run directory; or directory, or name on the hub, of a Hugging Face model.
        sizes: Sizes of the engine.
        step: Step of the checkpoint; the newest when None.
        mesh: Mesh of an instance with the axes tensor and expert; one device when None.
        initial: Model that the adapter of the run was trained on, where it has moved.
        name: Name of the model; that of the run when None.
        template: How turns are written; when None that of the training data, or of the tokenizer.
        eos: Whether the end-of-text token ends a text.
        adapters: Directories of LoRA runs of this model, by the names of the adapters.

    Raises:
        ValueError: There is no such run, it cannot be served, or an adapter is of another model.
    """
    groups = device_groups(sizes.instances, mesh)
    is_one = len(groups) == 1
    # Several instances take their weights from host memory.
    loaded = load_model(path, step=step, mesh=mesh if is_one else None, initial=initial)
    backend = backend_of(loaded.model)
    if not backend.is_spread:
        sizes.refuse(
            ("instances", "dispatch", "scaling"),
            f"is of models that write from left to right, and this one has the backend"
            f" {backend.name}",
        )
    if adapters and not is_one:
        raise ValueError(
            f"adapters: several of them are served on one device, and engine.instances="
            f"{sizes.instances}: leave it out, or serve one folded run"
        )
    if is_one:
        opened = open_executor(
            loaded, sizes, template=template, adapters=adapters, kind=MeshExecutor
        )
        executors = [opened.executor]
    else:
        executors = executors_on(
            groups,
            loaded.model,
            loaded.params,
            loaded.router_state,
            config=backend.sizes(sizes, loaded.length),
            execution=loaded.assembly.execution,
            mesh=mesh,
        )
        opened = Opened(executors[0], backend.config(sizes), {})
    times = None
    if sizes.scaling.needs_hardware:
        times = MeasuredSteps.of(executors[0], math.prod(executors[0].mesh.sizes))
    engine = FleetEngine(
        executors,
        opened.config,
        fleet=FleetConfig(dispatch=sizes.dispatch, scaling=sizes.scaling),
        codec=loaded.assembly.source,
        hardware=times,
        layouts=MeshLayouts(reachable(groups), times) if backend.is_spread else None,
    )
    served = served_by(engine, loaded, sizes, executors, name=name, template=template, eos=eos)
    return dataclasses.replace(served, adapters=opened.chats, routes=reshard_routes(engine))
