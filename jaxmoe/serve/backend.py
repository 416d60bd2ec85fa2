# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""What runs the steps of an engine: executors, and the backend that makes those of a model."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar, Protocol, runtime_checkable

from jaxmoe import catalog
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.config import ModelConfig
from jaxmoe.serve.config import InstancesConfig
from jaxmoe.serve.facts import Facts
from jaxmoe.serve.requests import Request
from jaxmoe.serve.sizes import EngineSizesConfig
from jaxmoe.serve.step import EngineStep


@runtime_checkable
class Executor(Protocol):
    """What an engine needs of an executor; `jaxmoe.serve.device.executor.ModelExecutor` is one.

    `Facts.capabilities` says what it computes, and policies ask for it.
    """

    def facts(self, *, max_waiting: int) -> Facts:
        """Return the sizes of the instance."""
        ...

    def check(self, request: Request) -> None:
        """Raise ValueError if the executor cannot compute a request."""
        ...

    def run(self, step: EngineStep) -> dict[int, Any]:
        """Compute a step and return what it has drawn by request, as the instance takes it."""
        ...

    def reset(self) -> None:
        """Begin with empty pages, after a step that failed."""
        ...

    def expert_load(self) -> Any:
        """Return the tokens that each expert of each MoE layer has got [L E]; None without any."""
        ...


@runtime_checkable
class AheadExecutor(Executor, Protocol):
    """An executor whose `Facts.steps_ahead` is 1: a step is launched before the last is collected.

    Steps are computed in the order of their launches, and collected in it.
    """

    def launch(self, step: EngineStep) -> Any:
        """Begin a step, whose tokens that are pending are those of the step before."""
        ...

    def collect(self, launched: Any) -> dict[int, Any]:
        """Wait for a step, and return what it has drawn by request, as `run` does.

        Args:
            launched: What `launch` has returned.
        """
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BackendConfig(abc.ABC):
    """How the models of one kind are served: their executor, its sizes, and the plan of a step."""

    name: ClassVar[str]
    is_spread: ClassVar[bool]
    """Whether it serves on meshes, on several devices and with adapters."""

    @abc.abstractmethod
    def fits(self, model: ModelConfig) -> bool:
        """Return whether models like this one are served so.

        Args:
            model: Config of the model.
        """

    @abc.abstractmethod
    def refusal(self, model: ModelConfig, execution: ExecutionConfig) -> str | None:
        """Return why a model cannot be served on one device, and the way out; None if it can.

        Args:
            model: Config of the model.
            execution: How it is computed.
        """

    @abc.abstractmethod
    def sizes(self, engine: EngineSizesConfig, length: int) -> Any:
        """Return the sizes of an executor.

        Args:
            engine: What the flags of `serve` ask for.
            length: Tokens of a sequence that the model was trained for.

        Raises:
            ValueError: A field has no meaning for this backend, or the sizes hold no request.
        """

    @abc.abstractmethod
    def sizes_for(self, *, max_length: int, batch_size: int) -> Any:
        """Return the sizes of an executor that answers some prompts and never waits for room.

        Args:
            max_length: Tokens of a prompt and its answer at most.
            batch_size: Prompts that are answered together.
        """

    @abc.abstractmethod
    def executor(
        self,
        model: ModelConfig,
        params: Any,
        router_state: Any,
        *,
        sizes: Any,
        execution: ExecutionConfig,
    ) -> Executor:
        """Return an executor on one device, compiled.

        Args:
            model: Config of the model.
            params: Its parameters, in host memory or on the device.
            router_state: State of the routers; fresh when None.
            sizes: What `sizes` or `sizes_for` has returned.
            execution: How the model is computed.
        """

    @abc.abstractmethod
    def config(self, engine: EngineSizesConfig | None = None) -> InstancesConfig:
        """Return the queue and the policies of an engine.

        Args:
            engine: What the flags of `serve` ask for; the defaults of texts when None.
        """


def backend_of(model: ModelConfig) -> BackendConfig:
    """Return how a model is served: the first backend of the catalogue that fits it.

    Args:
        model: Config of the model.

    Raises:
        ValueError: None does.
    """
    for name in catalog.names("backend"):
        backend: BackendConfig = catalog.choice("backend", name)()
        if backend.fits(model):
            return backend
    raise ValueError(
        f"model.attention.is_causal={model.attention.is_causal}: no backend of the catalogue"
        f" ({', '.join(catalog.names('backend'))}) serves such a model: add one to the catalogue"
    )
