# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Starts an engine over a trained run or a Hugging Face model, with its tokens and its template.

Sizes and policies of an engine are what the flags `--engine.*` of `serve` name.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import jax

from jaxmoe.adapters import ADAPTERS
from jaxmoe.catalog import choice, names
from jaxmoe.data.chat import TemplateName
from jaxmoe.execution import ExecutionConfig
from jaxmoe.generation.text_stream import TextCodec
from jaxmoe.models.config import ModelConfig
from jaxmoe.run.assemble import Assembly
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.load import load_run
from jaxmoe.run.provenance.saved import (
    Ends,
    end_ids,
    imported_generation,
    length_of,
    saved_config,
)
from jaxmoe.run.provenance.tokens import chat_format
from jaxmoe.serve.backend import backend_of
from jaxmoe.serve.config import InstancesConfig
from jaxmoe.serve.device.executor import ModelExecutor
from jaxmoe.serve.engine import Engine
from jaxmoe.serve.http.grammars import Grammars
from jaxmoe.serve.http.marks import with_marks
from jaxmoe.serve.http.reasoning import ReasoningParserConfig
from jaxmoe.serve.http.served import ChatFormat, Served, sampling_defaults
from jaxmoe.serve.http.tools import fitting_parser
from jaxmoe.serve.http.tools.base import ToolParserConfig
from jaxmoe.serve.requests import PoolingType
from jaxmoe.serve.sizes import EngineSizesConfig
from sharding.mesh import MeshConfig

SamplingDefaults = Literal["model", "plain"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ServedCheckpoint:
    """A checkpoint to serve, and how it answers."""

    path: str
    """Run directory; or directory, or name on the hub, of a Hugging Face model."""
    step: int | None = None
    """Step of the checkpoint; the newest when None."""
    mesh: MeshConfig | None = None
    """Mesh of an instance with the axes tensor and expert; one device when None."""
    initial: str | None = None
    """Model that the adapter of the run was trained on, where it has moved."""
    name: str | None = None
    """Name of the model; that of the run when None."""
    template: TemplateName | None = None
    """How turns are written; when None that of the training data, or of the tokenizer."""
    eos: Ends = "auto"
    """Whether the end-of-text token ends a text."""
    sampling: SamplingDefaults = "model"
    """Where the defaults of the sampling come from: generation_config.json, or those of the
    API."""
    adapters: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Directories of LoRA runs of this model, by the names of the adapters."""
    tool_parser: str = "auto"
    """How calls in answers are written: a member of `tool_parser`, none, or auto for that of the
    chat template."""
    reasoning_parser: str = "none"
    """How the reasoning of answers is told from their content: a member of `reasoning_parser`."""
    pooling_type: PoolingType = "last"
    """How hidden states become an embedding."""

    def __post_init__(self):
        if self.tool_parser not in ("auto", "none"):
            choice("tool_parser", self.tool_parser)
        choice("reasoning_parser", self.reasoning_parser)


class ModelToServe(NamedTuple):
    """Model of a checkpoint, on its way into executors."""

    checkpoint: ServedCheckpoint
    """Where it was read, and how it answers."""
    assembly: Assembly
    """The run, with its tokens."""
    params: Any
    """Parameters; host arrays where one device is to serve them."""
    router_state: Any
    """State of the routers."""
    step: int
    """Step of the checkpoint."""
    length: int
    """Tokens of a sequence that the model was trained for."""
    codec: TextCodec
    """Encoder and decoder of its text, with the marks of calls and reasoning."""
    chat: ChatFormat | None
    """How it reads conversations; None where it was not trained on any."""
    tool_parser: ToolParserConfig | None
    """How calls in its answers are written; None refuses tools."""
    reasoning: ReasoningParserConfig
    """How the reasoning of its answers is told from their content."""

    @property
    def model(self) -> ModelConfig:
        """Config of the model."""
        return self.assembly.plan.model

    @property
    def is_alone(self) -> bool:
        """Whether one device is to serve it."""
        return self.checkpoint.mesh is None or self.assembly.mesh.size == 1


class Opened(NamedTuple):
    """An executor of a checkpoint, compiled."""

    executor: Any
    config: InstancesConfig
    """Queue, and what the instance computes."""
    chats: Mapping[str, ChatFormat | None]
    """How each adapter reads conversations."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ServerConfig(EngineSizesConfig, abc.ABC):
    """Socket `server`: sizes of an engine, and how it is started; see the members."""

    name: ClassVar[str]
    """Name in the catalogue."""

    @abc.abstractmethod
    def open(self, checkpoint: ServedCheckpoint) -> Served:
        """Read a checkpoint, compile the steps and start an engine; the caller closes it.

        Args:
            checkpoint: Model, and how it answers.

        Raises:
            ValueError: There is no such run, it cannot be served, or an adapter is of another
                model.
        """

    @abc.abstractmethod
    def describe(self) -> str:
        """Return lines for the user about the instances; empty where there is nothing to say."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OneEngineConfig(ServerConfig):
    """One instance of the model."""

    name: ClassVar[str] = "one"

    def open(self, checkpoint: ServedCheckpoint) -> Served:
        """Start an engine of one instance."""
        return open_served(checkpoint, self)

    def describe(self) -> str:
        """Return nothing."""
        return ""


def default_server() -> ServerConfig:
    """Return the server of a command that names none: the first of the catalogue."""
    return choice("server", names("server")[0])()


def open_served(checkpoint: ServedCheckpoint, sizes: EngineSizesConfig) -> Served:
    """Read a checkpoint, compile the steps and start an engine; the caller closes it.

    Args:
        checkpoint: Model, and how it answers.
        sizes: Sizes of the engine.

    Raises:
        ValueError: There is no such run, it cannot be served, or an adapter is of another model.
    """
    loaded = load_model(checkpoint)
    opened = open_executor(loaded, sizes)
    engine = Engine(opened.executor, opened.config, codec=loaded.codec)
    return served_by(engine, loaded, sizes, [opened.executor], opened.chats)


def load_model(checkpoint: ServedCheckpoint) -> ModelToServe:
    """Read a checkpoint that is to be served.

    Args:
        checkpoint: Which, and on which mesh.

    Raises:
        ValueError: There is no such run.
    """
    path = checkpoint.path
    assembly, state, step = load_run(
        path,
        checkpoint.step,
        MeshConfig(data=-1) if checkpoint.mesh is None else checkpoint.mesh,
        needs_data=False,
        initial=checkpoint.initial,
    )
    length = length_of(RunDirectory(path), assembly.plan.config)
    chat = _chat(assembly, RunDirectory(path), checkpoint.template)
    tool_parser = _tool_parser(checkpoint.tool_parser, chat)
    reasoning = choice("reasoning_parser", checkpoint.reasoning_parser)()
    source: Any = assembly.source
    codec: TextCodec = source
    if chat is not None:
        marks = (*(tool_parser.marks if tool_parser else ()), *reasoning.marks)
        codec = with_marks(source, chat.tokenizer, marks)
    loaded = ModelToServe(
        checkpoint,
        assembly,
        state.params,
        state.router_state,
        step,
        length,
        codec=codec,
        chat=chat,
        tool_parser=tool_parser,
        reasoning=reasoning,
    )
    if loaded.is_alone:
        params, router_state = jax.device_get((loaded.params, loaded.router_state))
        loaded = loaded._replace(params=params, router_state=router_state)
    return loaded


def open_executor(
    loaded: ModelToServe,
    sizes: EngineSizesConfig,
    *,
    kind: type[ModelExecutor] = ModelExecutor,
) -> Opened:
    """Compile the steps of an instance.

    Args:
        loaded: The model.
        sizes: Sizes of the engine.
        kind: Class of the executor of models that are served on meshes.

    Raises:
        ValueError: The model cannot be served, or an adapter is of another model.
    """
    model = loaded.model
    assembly = loaded.assembly
    checkpoint = loaded.checkpoint
    backend = backend_of(model)
    executor_sizes = backend.sizes(sizes, loaded.length)
    config = backend.config(sizes)
    if not backend.is_spread:
        if not loaded.is_alone or checkpoint.adapters:
            raise ValueError(
                f"run.directory={checkpoint.path} is served on one device and without adapters"
                f" (backend {backend.name}); run.mesh={checkpoint.mesh},"
                f" adapters={[*checkpoint.adapters]}: leave them out"
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
    if checkpoint.adapters:
        if not loaded.is_alone:
            raise ValueError(
                f"adapters: several of them are served on one device, and"
                f" run.mesh={checkpoint.mesh}: leave it out, or serve one folded run"
            )
        model, params, chats = _adapt(loaded)
    # Not `backend.executor`, which is for one device: `kind` alone takes a mesh and adapters.
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


def served_by(
    engine: Engine,
    loaded: ModelToServe,
    sizes: EngineSizesConfig,
    executors: Sequence[Any],
    chats: Mapping[str, ChatFormat | None],
) -> Served:
    """Return the model behind an engine, with its tokens and its template.

    Args:
        engine: Engine with the codec of the model.
        loaded: The model.
        sizes: Sizes of the engine.
        executors: What computes its steps.
        chats: How each adapter reads conversations.
    """
    assembly = loaded.assembly
    checkpoint = loaded.checkpoint
    directory = RunDirectory(checkpoint.path)
    config = assembly.plan.config
    defaults: Mapping[str, float] = {}
    if checkpoint.sampling == "model":
        defaults = sampling_defaults(imported_generation(directory)[1])
    eos_ids = end_ids(directory, config, assembly.source, checkpoint.eos)
    chat = loaded.chat
    # Where a grammar allows an end, those of a conversation end an answer too.
    ends = eos_ids if chat is None else (*eos_ids, *chat.ends[0])
    return Served(
        name=checkpoint.name or str(config.run.name or directory.path.resolve().name),
        engine=engine,
        codec=loaded.codec,
        chat=chat,
        eos_ids=eos_ids,
        adapters=chats,
        grammars=Grammars(loaded.codec, assembly.source.vocab_size, ends),
        tool_parser=loaded.tool_parser,
        reasoning=loaded.reasoning,
        defaults=defaults,
        pooling_type=checkpoint.pooling_type,
        max_logprobs=sizes.num_logprobs,
        has_experts=sizes.has_experts,
        pool_bytes=sum(executor.pool_bytes for executor in executors),
        compile_seconds=sum(executor.compile_seconds for executor in executors),
    )


def _tool_parser(name: str, chat: ChatFormat | None) -> ToolParserConfig | None:
    """Return a parser of calls by its name, or that of the chat template with `auto`."""
    if name not in ("auto", "none"):
        return choice("tool_parser", name)()
    return None if name == "none" or chat is None else fitting_parser(chat.template)


def _adapt(loaded: ModelToServe) -> tuple[ModelConfig, Any, dict[str, ChatFormat | None]]:
    """Return the model and its parameters with all adapters, and how each reads conversations.

    The fingerprint of the model that each adapter was trained on is compared as it is loaded.

    Args:
        loaded: The model, as host arrays.
    """
    model = loaded.model
    checkpoint = loaded.checkpoint
    path = checkpoint.path
    if model.adapter is not None:
        raise ValueError(
            f"adapters: run.directory={path} must be a model without an adapter: name the run that"
            " the adapters were trained on"
        )
    joint: Any = ADAPTERS["task_lora"]
    by_name = {}
    chats = dict[str, ChatFormat | None]()
    for name, directory in checkpoint.adapters.items():
        joint.check_together(name, saved_config(directory).model.adapter)
        assembly, state, _ = load_run(
            directory, None, MeshConfig(data=-1), needs_data=False, initial=path
        )
        initial = assembly.plan.config.checkpoint.initial
        trained_on = None if initial is None else initial.step
        if trained_on not in (None, loaded.step):
            raise ValueError(
                f"adapters: {directory} was trained on step {trained_on} of {path}, and step"
                f" {loaded.step} is served: serve it with --run.step {trained_on}"
            )
        by_name[name] = assembly.plan.model.adapter, jax.device_get(state.params)
        chats[name] = _chat(assembly, RunDirectory(directory), checkpoint.template)
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
