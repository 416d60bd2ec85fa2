# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Backend of masked-diffusion models: rows at different steps, filled in together."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax

from jaxmoe.contrib.diffusion.config import DiffusionConfig, DiffusionSizes
from jaxmoe.contrib.diffusion.executor import DiffusionExecutor, why_not_filled
from jaxmoe.contrib.diffusion.writer import STEPS_PER_TOKEN
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.config import ModelConfig
from jaxmoe.serve.backend import BackendConfig, Executor
from jaxmoe.serve.config import InstancesConfig
from jaxmoe.serve.sizes import EngineSizesConfig

_OF_PAGES = (
    "batching",
    "retention",
    "pieces",
    "pages",
    "page_size",
    "num_logprobs",
    "has_experts",
    "drafts",
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RowsConfig(BackendConfig):
    """Rows of a masked-diffusion model, filled in together."""

    name: ClassVar[str] = "rows"
    is_spread: ClassVar[bool] = False

    def fits(self, model: ModelConfig) -> bool:
        """Return whether the model sees both sides of a gap."""
        return not model.attention.is_causal

    def refusal(self, model: ModelConfig, execution: ExecutionConfig) -> str | None:
        """Return why the rows of the model cannot be filled."""
        return why_not_filled(model, execution)

    def sizes(self, engine: EngineSizesConfig, length: int) -> DiffusionSizes:
        """Return the number of rows, their lengths and the logit budget."""
        engine.refuse(
            _OF_PAGES,
            "is of models that write from left to right, and this one fills rows by masked"
            " diffusion; its sizes are max_sequences, max_length and logit_budget",
        )
        lengths = engine.lengths(length)
        if lengths[-1] < 2:
            raise ValueError("engine.max_length=1 must be at least 2: a prompt and an answer")
        return DiffusionSizes(
            rows=engine.max_sequences, lengths=lengths, budget=engine.logit_budget
        )

    def sizes_for(self, *, max_length: int, batch_size: int) -> DiffusionSizes:
        """Return a row for each prompt."""
        return DiffusionSizes(rows=batch_size, lengths=(max_length,))

    def executor(
        self,
        model: ModelConfig,
        params: Any,
        router_state: Any,
        *,
        sizes: Any,
        execution: ExecutionConfig,
    ) -> Executor:
        """Return a `DiffusionExecutor`."""
        params, router_state = jax.device_put((params, router_state))
        return DiffusionExecutor(model, params, router_state, config=sizes, execution=execution)

    def config(self, engine: EngineSizesConfig | None = None) -> InstancesConfig:
        """Return the queue and the steps of a request."""
        if engine is None:
            return DiffusionConfig(steps_per_token=STEPS_PER_TOKEN)
        return DiffusionConfig(
            steps_per_token=engine.steps_per_token, max_waiting=engine.max_waiting
        )
