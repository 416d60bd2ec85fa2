# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Starts an engine over a trained run or a Hugging Face model, with its tokens and its template.

Sizes and policies of an engine are what the flags `--engine.*` of `serve` name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from jaxmoe.adapters import ADAPTERS
from jaxmoe.data.chat import TemplateName
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.config import ModelConfig
from jaxmoe.models.diffuse import BUDGET
from jaxmoe.run.assemble import Assembly
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.load import load_run
from jaxmoe.run.provenance.saved import Ends, end_ids, length_of, saved_config
from jaxmoe.run.provenance.tokens import chat_format
from jaxmoe.serve.blocks import num_pages
from jaxmoe.serve.device.config import ExecutorConfig
from jaxmoe.serve.device.executor import ModelExecutor
from jaxmoe.serve.device.instances import device_groups, executors_on, reachable
from jaxmoe.serve.device.resharding import MeshLayouts
from jaxmoe.serve.device.timing import MeasuredSteps
from jaxmoe.serve.diffusion.config import DiffusionConfig, DiffusionSizes, check_steps
from jaxmoe.serve.diffusion.executor import DiffusionExecutor
from jaxmoe.serve.engine import Engine
from jaxmoe.serve.fleet.config import EngineConfig, InstancesConfig
from jaxmoe.serve.http.served import ChatFormat, Served
from jaxmoe.serve.plan import Shapes
from jaxmoe.serve.policies.batching import BatchingConfig, SplitFuseConfig
from jaxmoe.serve.policies.dispatch import DispatchConfig, LeastLoadedConfig
from jaxmoe.serve.policies.retention import LRUConfig, RetentionConfig
from jaxmoe.serve.policies.scaling import FixedConfig, ScalingConfig
from sharding.mesh import MeshConfig

_LONGEST = 4096
"""Tokens of a request by default, where a model allows more."""
_SHORT = 512
"""Tokens of a request up to which attention reads a shorter table."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EngineSizesConfig:
    """Sizes of an engine: what is compiled and allocated at the start."""

    max_sequences: int = 16
    """Requests that are computed together; the others wait."""
    pieces: tuple[str, ...] = ("1x256", "4x64")
    """Shapes of the parts of prompts in a step, number x tokens; one program is compiled for each,
    and one for a step without."""
    max_length: int | None = None
    """Tokens of a request, its answer included; what the model was trained for, at most 4096, when
    None."""
    pages: int | None = None
    """Pages of keys and values; enough for all sequences at half of the length when None."""
    page_size: int = 16
    """Tokens of a page."""
    max_waiting: int = 256
    """Requests that may wait; further ones are refused."""
    num_logprobs: int = 5
    """Most likely tokens whose log-probabilities a request may ask for."""
    has_experts: bool = False
    """Whether a request may ask for the experts of each token, which are then kept in host memory
    for every token in a page."""
    batching: BatchingConfig = SplitFuseConfig()
    """What a step computes."""
    instances: int = 1
    """Instances of the model, each on devices of its own; all share the devices where there are
    enough for one only."""
    dispatch: DispatchConfig = LeastLoadedConfig()
    """Which instance answers a request, and what moves between them."""
    retention: RetentionConfig = LRUConfig()
    """Which pages a request gets, and what becomes of those of a preempted one."""
    scaling: ScalingConfig = FixedConfig()
    """How many instances take requests, and on how many devices each is."""
    steps_per_token: float = 1.0
    """Steps of a masked-diffusion model for each token of an answer."""
    logit_budget: int = BUDGET
    """Positions whose logits a masked-diffusion model computes at a time; a step fills about
    max_sequences / steps_per_token."""

    def __post_init__(self):
        for field in (
            *("max_sequences", "max_length", "pages", "page_size", "max_waiting", "instances"),
            "logit_budget",
        ):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ValueError(f"engine.{field}={value} must be at least 1")
        if self.num_logprobs < 0:
            raise ValueError(f"engine.num_logprobs={self.num_logprobs} must be 0 or more")
        check_steps("engine.steps_per_token", self.steps_per_token)
        roles = self.dispatch.roles(self.instances)
        self.scaling.check(roles=roles, has_power=False, has_objectives=False)
        if not self.pieces:
            raise ValueError("engine.pieces is empty: name a shape for prompts, such as 1x256")
        for piece in self.pieces:
            if not re.fullmatch(r"[1-9]\d{0,5}x[1-9]\d{0,5}", piece):
                raise ValueError(
                    f"engine.pieces={piece} must be number x tokens, such as 4x64: 4 prompts, 64"
                    " tokens of each"
                )

    @property
    def shapes(self) -> Shapes:
        """Compiled shapes of a step."""
        pieces = (tuple(map(int, piece.split("x"))) for piece in self.pieces)
        return Shapes(
            singles=self.max_sequences, pieces=tuple((count, size) for count, size in pieces)
        )

    def executor(self, length: int) -> ExecutorConfig:
        """Return the sizes of the executor.

        Args:
            length: Tokens of a sequence that the model was trained for.

        Raises:
            ValueError: The pages hold no whole request, or a field is of masked diffusion alone.
        """
        self._refuse(
            ("steps_per_token", "logit_budget"),
            "is of masked-diffusion models, and this one writes from left to right",
        )
        lengths = self._lengths(length)
        most = lengths[-1]
        each = num_pages(most, self.page_size)
        pages = self.pages or max(each, self.max_sequences * each // 2)
        if pages < each:
            raise ValueError(
                f"engine.pages={pages} x engine.page_size={self.page_size} hold no request of"
                f" {most} tokens: set engine.pages to at least {each}, or a shorter"
                " engine.max_length"
            )
        return ExecutorConfig(
            num_pages=pages,
            page_size=self.page_size,
            shapes=self.shapes,
            context_lengths=lengths,
            num_logprobs=self.num_logprobs,
            has_experts=self.has_experts,
        )

    def rows(self, length: int) -> DiffusionSizes:
        """Return the sizes of the executor of a masked-diffusion model.

        Args:
            length: Tokens of a sequence that the model was trained for.

        Raises:
            ValueError: A field is of other models alone.
        """
        self._refuse(
            (
                "instances",
                "dispatch",
                "batching",
                "retention",
                "scaling",
                "pieces",
                "pages",
                "page_size",
                "num_logprobs",
                "has_experts",
            ),
            "is of models that write from left to right, and this one fills rows by masked"
            " diffusion; its sizes are max_sequences, max_length and logit_budget",
        )
        lengths = self._lengths(length)
        if lengths[-1] < 2:
            raise ValueError("engine.max_length=1 must be at least 2: a prompt and an answer")
        return DiffusionSizes(rows=self.max_sequences, lengths=lengths, budget=self.logit_budget)

    def _lengths(self, length: int) -> tuple[int, ...]:
        most = self.max_length or min(length, _LONGEST)
        return (_SHORT, most) if most > 2 * _SHORT else (most,)

    def _refuse(self, fields: tuple[str, ...], why: str) -> None:
        """Raise if one of the fields is not as it is by default."""
        plain = EngineSizesConfig()
        for field in fields:
            if (value := getattr(self, field)) != getattr(plain, field):
                raise ValueError(f"engine.{field}={value} {why}: leave it out")


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
        model, params, chats = _adapt(path, step, model, params, adapters, template)
    options: dict[str, Any] = {"config": sizes.executor(length), "execution": assembly.execution}
    config = EngineConfig(
        batching=sizes.batching,
        dispatch=sizes.dispatch,
        retention=sizes.retention,
        scaling=sizes.scaling,
        max_waiting=sizes.max_waiting,
    )
    if len(groups) > 1:
        executors = executors_on(groups, model, params, router_state, mesh=mesh, **options)
    else:
        options |= {"mesh": None if is_alone else assembly.mesh, "adapters": tuple(chats)}
        executors = [ModelExecutor(model, params, router_state, **options)]
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
        pool_bytes=sum(executor.pool_bytes for executor in executors),
        compile_seconds=sum(executor.compile_seconds for executor in executors),
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


def _adapt(
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
    joint: Any = ADAPTERS["task_lora"]
    by_name, chats = {}, dict[str, ChatFormat | None]()
    for name, directory in adapters.items():
        joint.check_together(name, saved_config(directory).model.adapter)
        assembly, state, _ = load_run(
            directory, None, MeshConfig(data=-1), needs_data=False, initial=path
        )
        by_name[name] = assembly.plan.model.adapter, jax.device_get(state.params)
        chats[name] = _chat(assembly, RunDirectory(directory), template)
    adapter, params = joint.together(params, by_name)
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
