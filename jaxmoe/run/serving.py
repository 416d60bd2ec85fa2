# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Starts an engine over a trained run or a Hugging Face model, with its tokens and its template.

Sizes and policies of an engine are what the flags `--engine.*` of `serve` name.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jaxmoe.adapters import ADAPTERS
from jaxmoe.data.chat import TemplateName
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.config import ModelConfig
from jaxmoe.run.assemble import Assembly
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.load import load_run
from jaxmoe.run.provenance.saved import Ends, end_ids, length_of, saved_config
from jaxmoe.run.provenance.tokens import chat_format
from jaxmoe.serve.backend import backend_of
from jaxmoe.serve.config import InstancesConfig
from jaxmoe.serve.device.executor import ModelExecutor
from jaxmoe.serve.engine import Engine
from jaxmoe.serve.http.served import ChatFormat, Served
from jaxmoe.serve.sizes import EngineSizesConfig
from sharding.mesh import MeshConfig


class ModelToServe(NamedTuple):
    """Model of a checkpoint, on its way into executors."""

    path: str
    """Where it was read."""
    assembly: Assembly
    """The run, with its tokens."""
    params: Any
    """Parameters; host arrays where one device is to serve them."""
    router_state: Any
    """State of the routers."""
    length: int
    """Tokens of a sequence that the model was trained for."""
    step: int | None
    """Step of the checkpoint that was asked for."""
    mesh: MeshConfig | None
    """Mesh that was asked for."""

    @property
    def model(self) -> ModelConfig:
        """Config of the model."""
        return self.assembly.plan.model

    @property
    def is_alone(self) -> bool:
        """Whether one device is to serve it."""
        return self.mesh is None or self.assembly.mesh.size == 1


class Opened(NamedTuple):
    """An executor of a checkpoint, compiled."""

    executor: Any
    config: InstancesConfig
    """Queue, and what the instance computes."""
    chats: dict[str, ChatFormat | None]
    """How each adapter reads conversations."""


def load_model(
    path: str,
    *,
    step: int | None = None,
    mesh: MeshConfig | None = None,
    initial: str | None = None,
) -> ModelToServe:
    """Read a checkpoint that is to be served.

    Args:
        path: Run directory; or directory, or name on the hub, of a Hugging Face model.
        step: Step of the checkpoint; the newest when None.
        mesh: Mesh with the axes tensor and expert; one device when None.
        initial: Model that the adapter of the run was trained on, where it has moved.

    Raises:
        ValueError: There is no such run.
    """
    assembly, state, _ = load_run(
        path, step, MeshConfig(data=-1) if mesh is None else mesh, needs_data=False, initial=initial
    )
    length = length_of(RunDirectory(path), assembly.plan.config)
    loaded = ModelToServe(path, assembly, state.params, state.router_state, length, step, mesh)
    if loaded.is_alone:
        params, router_state = jax.device_get((loaded.params, loaded.router_state))
        loaded = loaded._replace(params=params, router_state=router_state)
    return loaded


def open_executor(
    loaded: ModelToServe,
    sizes: EngineSizesConfig,
    *,
    template: TemplateName | None = None,
    adapters: Mapping[str, str] | None = None,
    kind: type[ModelExecutor] = ModelExecutor,
) -> Opened:
    """Compile the steps of an instance.

    Args:
        loaded: The model.
        sizes: Sizes of the engine.
        template: See `open_served`.
        adapters: Directories of LoRA runs of this model, by the names of the adapters.
        kind: Class of the executor of models that are served on meshes.

    Raises:
        ValueError: The model cannot be served, or an adapter is of another model.
    """
    model = loaded.model
    mesh = loaded.mesh
    assembly = loaded.assembly
    backend = backend_of(model)
    executor_sizes = backend.sizes(sizes, loaded.length)
    config = backend.config(sizes)
    if not backend.is_spread:
        if not loaded.is_alone or adapters:
            raise ValueError(
                f"run.directory={loaded.path} is served on one device and without adapters (backend"
                f" {backend.name}); run.mesh={mesh}, adapters={[*(adapters or ())]}: leave them out"
            )
        executor = backend.executor(
            model,
            loaded.params,
            loaded.router_state,
            sizes=executor_sizes,
            execution=ExecutionConfig(precision=assembly.execution.precision),
        )
        return Opened(executor, config, {})
    params = loaded.params
    chats = dict[str, ChatFormat | None]()
    if adapters:
        if not loaded.is_alone:
            raise ValueError(
                f"adapters: several of them are served on one device, and run.mesh={mesh}: leave"
                " it out, or serve one folded run"
            )
        model, params, chats = _adapt(loaded, adapters, template)
    executor = kind(
        model,
        params,
        loaded.router_state,
        config=executor_sizes,
        execution=assembly.execution,
        mesh=None if loaded.is_alone else assembly.mesh,
        adapters=tuple(chats),
    )
    return Opened(executor, config, chats)


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
    loaded = load_model(path, step=step, mesh=mesh, initial=initial)
    executor, config, chats = open_executor(loaded, sizes, template=template, adapters=adapters)
    engine = Engine(executor, config, codec=loaded.assembly.source)
    served = served_by(engine, loaded, sizes, [executor], name=name, template=template, eos=eos)
    return dataclasses.replace(served, adapters=chats)


def served_by(
    engine: Engine,
    loaded: ModelToServe,
    sizes: EngineSizesConfig,
    executors: Sequence[Any],
    *,
    name: str | None,
    template: TemplateName | None,
    eos: Ends,
) -> Served:
    """Return the model behind an engine, with its tokens and its template.

    Args:
        engine: Engine with the codec of the model.
        loaded: The model.
        sizes: Sizes of the engine.
        executors: What computes its steps.
        name: See `open_served`.
        template: See `open_served`.
        eos: See `open_served`.
    """
    assembly = loaded.assembly
    directory = RunDirectory(loaded.path)
    config = assembly.plan.config
    return Served(
        name=name or str(config.run.name or directory.path.resolve().name),
        engine=engine,
        codec=assembly.source,
        chat=_chat(assembly, directory, template),
        eos_ids=end_ids(directory, config, assembly.source, eos),
        max_logprobs=sizes.num_logprobs,
        has_experts=sizes.has_experts,
        pool_bytes=sum(executor.pool_bytes for executor in executors),
        compile_seconds=sum(executor.compile_seconds for executor in executors),
    )


def _adapt(
    loaded: ModelToServe, adapters: Mapping[str, str], template: TemplateName | None
) -> tuple[ModelConfig, Any, dict[str, ChatFormat | None]]:
    """Return the model and its parameters with all adapters, and how each reads conversations.

    The fingerprint of the model that each adapter was trained on is compared as it is loaded.

    Args:
        loaded: The model, as host arrays.
        adapters: Directories by name.
        template: See `open_served`.
    """
    model = loaded.model
    path = loaded.path
    if model.adapter is not None or loaded.step is not None:
        raise ValueError(
            f"adapters: run.directory={path} must be a model without an adapter at its newest"
            " checkpoint: name the run that the adapters were trained on, and leave run.step out"
        )
    joint: Any = ADAPTERS["task_lora"]
    by_name = {}
    chats = dict[str, ChatFormat | None]()
    for name, directory in adapters.items():
        joint.check_together(name, saved_config(directory).model.adapter)
        assembly, state, _ = load_run(
            directory, None, MeshConfig(data=-1), needs_data=False, initial=path
        )
        by_name[name] = assembly.plan.model.adapter, jax.device_get(state.params)
        chats[name] = _chat(assembly, RunDirectory(directory), template)
    adapter, params = joint.together(loaded.params, by_name)
    return dataclasses.replace(model, adapter=adapter), params, chats


def _chat(
    assembly: Assembly, directory: RunDirectory, template: TemplateName | None
) -> ChatFormat | None:
    """Return how the model reads conversations; None if it was not trained on any."""
    source: Any = assembly.source
    arguments = (source, assembly.plan.config, directory, template)
    # A template that was asked for and cannot be used is an error.
    with contextlib.suppress(*(() if template else (ValueError,))):
        chat, tokenizer = chat_format(*arguments)
        return ChatFormat(template=chat, tokenizer=tokenizer)
    return None
