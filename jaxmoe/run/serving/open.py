# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Starts an engine over a trained run or a Hugging Face model, with its tokens and its template."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from jaxmoe.adapters import check_together, together
from jaxmoe.data.chat import TemplateName
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.config import ModelConfig
from jaxmoe.run.assemble import Assembly
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.load import load_run
from jaxmoe.run.provenance.saved import Ends, end_ids, length_of, saved_config
from jaxmoe.run.provenance.tokens import chat_format
from jaxmoe.run.serving.instances import device_groups, executors_on, reachable
from jaxmoe.run.serving.sizes import EngineSizesConfig
from jaxmoe.serve.device.executor import ModelExecutor
from jaxmoe.serve.device.resharding import MeshLayouts
from jaxmoe.serve.device.timing import MeasuredSteps
from jaxmoe.serve.diffusion.config import DiffusionConfig, DiffusionSizes
from jaxmoe.serve.diffusion.executor import DiffusionExecutor
from jaxmoe.serve.engine import Engine
from jaxmoe.serve.fleet.config import EngineConfig, InstancesConfig
from jaxmoe.serve.http.served import ChatFormat, Served
from sharding.mesh import MeshConfig


class Opened(NamedTuple):
    """Executors of a checkpoint."""

    executors: list[Any]
    """One for each instance."""
    config: InstancesConfig
    """Queue, and what an instance computes."""
    assembly: Assembly
    """The run, with its tokens."""
    chats: dict[str, ChatFormat | None]
    """How each adapter reads conversations."""
    hardware: MeasuredSteps | None = None
    """Times of a step, where the scaling policy asks for them."""
    layouts: MeshLayouts | None = None
    """Meshes that the instances may have; None keeps them."""


def open_executors(
    path: str,
    sizes: EngineSizesConfig,
    *,
    step: int | None = None,
    mesh: MeshConfig | None = None,
    initial: str | None = None,
    template: TemplateName | None = None,
    adapters: Mapping[str, str] | None = None,
) -> Opened:
    """Read a checkpoint and compile the steps of every instance.

    Args:
        path: Run directory; or directory, or name on the hub, of a Hugging Face model.
        sizes: Sizes of the engine.
        step: Step of the checkpoint; the newest when None.
        mesh: Mesh with the axes tensor and expert; one device when None.
        initial: Model that the adapter of the run was trained on, where it has moved.
        template: See `open_served`.
        adapters: Directories of LoRA runs of this model, by the names of the adapters.

    Raises:
        ValueError: There is no such run, it cannot be served, or an adapter is of another model.
    """
    groups = device_groups(sizes.instances, mesh)
    # Several instances take their weights from host memory.
    loaded = MeshConfig(data=-1) if mesh is None or len(groups) > 1 else mesh
    assembly, state, _ = load_run(path, step, loaded, needs_data=False, initial=initial)
    model, chats = assembly.plan.model, dict[str, ChatFormat | None]()
    params, router_state = state.params, state.router_state
    is_alone = len(groups) == 1 and (mesh is None or assembly.mesh.size == 1)
    if is_alone:
        params, router_state = jax.device_get((params, router_state))
    length = length_of(RunDirectory(path), assembly.plan.config)
    if not model.attention.is_causal:
        rows = sizes.rows(length)
        if not is_alone or adapters:
            raise ValueError(
                f"run.directory={path} fills rows by masked diffusion, which is served on one"
                f" device and without adapters; run.mesh={mesh}, adapters={[*(adapters or ())]}:"
                " leave them out"
            )
        config = DiffusionConfig(
            steps_per_token=sizes.steps_per_token, max_waiting=sizes.max_waiting
        )
        return Opened([_filling(assembly, params, router_state, rows)], config, assembly, {})
    if adapters and not is_alone:
        raise ValueError(
            f"adapters: several of them are served on one device, and engine.instances="
            f"{sizes.instances}, run.mesh={mesh}: leave both out, or serve one folded run"
        )
    if adapters:
        model, params, chats = _adapted(path, step, model, params, adapters, template)
    given: dict[str, Any] = {"config": sizes.executor(length), "execution": assembly.execution}
    config = EngineConfig(
        batching=sizes.batching,
        dispatch=sizes.dispatch,
        retention=sizes.retention,
        scaling=sizes.scaling,
        max_waiting=sizes.max_waiting,
    )
    if len(groups) > 1:
        executors = executors_on(groups, model, params, router_state, mesh=mesh, **given)
    else:
        given |= {"mesh": None if is_alone else assembly.mesh, "adapters": tuple(chats)}
        executors = [ModelExecutor(model, params, router_state, **given)]
    first, times = executors[0], None
    if sizes.scaling.needs_hardware:
        times = MeasuredSteps.of(first, math.prod(first.mesh.sizes))
    layouts = MeshLayouts(reachable(groups), times)
    return Opened(executors, config, assembly, chats, times, layouts)


def open_served(
    path: str,
    sizes: EngineSizesConfig,
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

    Several instances have the same weights, each laid out by the mesh on devices of its own.

    Args:
        path: Run directory; or directory, or name on the hub, of a Hugging Face model.
        sizes: Sizes of the engine.
        step: Step of the checkpoint; the newest when None.
        mesh: Mesh with the axes tensor and expert; one device when None.
        initial: Model that the adapter of the run was trained on, where it has moved.
        name: Name of the model; that of the run when None.
        template: How turns are written; when None that of the training data, or of the tokenizer.
        eos: Whether the end-of-text token ends a text.
        adapters: Directories of LoRA runs of this model, by the names of the adapters.

    Raises:
        ValueError: There is no such run, it cannot be served, or an adapter is of another model.
    """
    opened = open_executors(
        path,
        sizes,
        step=step,
        mesh=mesh,
        initial=initial,
        template=template,
        adapters=adapters,
    )
    assembly, executors = opened.assembly, opened.executors
    config, directory = assembly.plan.config, RunDirectory(path)
    engine = Engine(
        executors,
        opened.config,
        codec=assembly.source,
        hardware=opened.hardware,
        layouts=opened.layouts,
    )
    return Served(
        name=name or str(config.run.name or directory.path.resolve().name),
        engine=engine,
        codec=assembly.source,
        chat=_chat(assembly, directory, template),
        adapters=opened.chats,
        eos_ids=end_ids(directory, config, assembly.source, eos),
        max_logprobs=sizes.num_logprobs,
        has_experts=sizes.has_experts,
        pool_bytes=sum(one.pool_bytes for one in executors),
        compile_seconds=sum(one.compile_seconds for one in executors),
    )


def _filling(
    assembly: Assembly, params: Any, router_state: Any, sizes: DiffusionSizes
) -> DiffusionExecutor:
    """Return the executor of a masked-diffusion model on one device.

    Args:
        assembly: The run.
        params: Its parameters as host arrays.
        router_state: State of its routers.
        sizes: Sizes of what is compiled.
    """
    params, router_state = jax.device_put((params, router_state))
    execution = ExecutionConfig(precision=assembly.execution.precision)
    model = assembly.plan.model
    return DiffusionExecutor(model, params, router_state, config=sizes, execution=execution)


def _adapted(
    path: str,
    step: int | None,
    model: ModelConfig,
    params: Any,
    adapters: Mapping[str, str],
    template: TemplateName | None,
) -> tuple[ModelConfig, Any, dict[str, ChatFormat | None]]:
    """Return the model and its parameters with all adapters, and how each reads conversations.

    The fingerprint of the model that each adapter was trained on is compared as it is loaded.

    Args:
        path: Directory of the model.
        step: Step of its checkpoint.
        model: Config of the model.
        params: Its parameters as host arrays.
        adapters: Directories by name.
        template: See `open_served`.
    """
    if model.adapter is not None or step is not None:
        raise ValueError(
            f"adapters: run.directory={path} must be a model without an adapter at its newest"
            " checkpoint: name the run that the adapters were trained on, and leave run.step out"
        )
    given, chats = {}, dict[str, ChatFormat | None]()
    for name, directory in adapters.items():
        check_together(name, saved_config(directory).model.adapter)
        assembly, state, _ = load_run(
            directory, None, MeshConfig(data=-1), needs_data=False, initial=path
        )
        given[name] = assembly.plan.model.adapter, jax.device_get(state.params)
        chats[name] = _chat(assembly, RunDirectory(directory), template)
    adapter, params = together(params, given)
    return dataclasses.replace(model, adapter=adapter), params, chats


def _chat(
    assembly: Assembly, directory: RunDirectory, template: TemplateName | None
) -> ChatFormat | None:
    """Return how the model reads conversations; None if it was not trained on any."""
    source: Any = assembly.source
    given = (source, assembly.plan.config, directory, template)
    # A template that was asked for and cannot be used is an error.
    with contextlib.suppress(*(() if template else (ValueError,))):
        found, tokenizer = chat_format(*given)
        return ChatFormat(template=found, tokenizer=tokenizer)
    return None
