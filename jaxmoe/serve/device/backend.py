# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Backend of models that write from left to right: keys and values in pages."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.config import ModelConfig
from jaxmoe.serve.backend import BackendConfig, Executor
from jaxmoe.serve.blocks import num_pages
from jaxmoe.serve.config import EngineConfig, InstancesConfig
from jaxmoe.serve.device.config import ExecutorConfig
from jaxmoe.serve.device.executor import ModelExecutor
from jaxmoe.serve.device.pages import why_not_served
from jaxmoe.serve.plan import Shapes
from jaxmoe.serve.sizes import EngineSizesConfig

_PIECE = 64
_SHORTEST = 256


def sizes_for(*, max_length: int, batch_size: int, page_size: int = 16) -> ExecutorConfig:
    """Return the sizes of an executor that never lacks pages.

    Args:
        max_length: Tokens of a prompt and its answer at most.
        batch_size: Prompts that are answered together.
        page_size: Tokens of a page.
    """
    lengths = {min(_SHORTEST, max_length), max_length}
    return ExecutorConfig(
        num_pages=batch_size * num_pages(max_length, page_size),
        page_size=page_size,
        shapes=Shapes(singles=batch_size, pieces=((1, min(_PIECE, max_length)),)),
        context_lengths=tuple(sorted(lengths)),
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PagesConfig(BackendConfig):
    """Keys and values in pages, one token after the other."""

    name: ClassVar[str] = "pages"
    is_spread: ClassVar[bool] = True

    def fits(self, model: ModelConfig) -> bool:
        """Return whether the model is causal."""
        return model.attention.is_causal

    def refusal(self, model: ModelConfig, execution: ExecutionConfig) -> str | None:
        """Return why the model's tokens would depend on those of other requests."""
        return why_not_served(model, execution, None)

    def sizes(self, engine: EngineSizesConfig, length: int) -> ExecutorConfig:
        """Return the numbers of pages and the compiled shapes."""
        return engine.executor(length)

    def sizes_for(self, *, max_length: int, batch_size: int) -> ExecutorConfig:
        """Return sizes that never lack pages."""
        return sizes_for(max_length=max_length, batch_size=batch_size)

    def executor(
        self,
        model: ModelConfig,
        params: Any,
        router_state: Any,
        *,
        sizes: Any,
        execution: ExecutionConfig,
    ) -> Executor:
        """Return a `ModelExecutor`."""
        return ModelExecutor(model, params, router_state, config=sizes, execution=execution)

    def config(self, engine: EngineSizesConfig | None = None) -> InstancesConfig:
        """Return the policies that the flags name."""
        if engine is None:
            return EngineConfig()
        return EngineConfig(
            batching=engine.batching,
            retention=engine.retention,
            max_waiting=engine.max_waiting,
        )
