# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Configs of serving by masked diffusion: sizes of the executor, and queue and steps of the engine.

Engine(DiffusionExecutor(model, params, config=DiffusionSizes()), DiffusionConfig())
"""

from __future__ import annotations

import dataclasses

from jaxmoe.contrib.diffusion.diffuse import BUDGET
from jaxmoe.contrib.diffusion.instance import RowsInstance, plan_rows
from jaxmoe.serve.config import InstancesConfig
from jaxmoe.serve.facts import Facts
from jaxmoe.serve.policies.batching import Batching

_MOST_STEPS = 1000
"""Steps of a token at most."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DiffusionSizes:
    """Sizes of what is compiled."""

    rows: int = 8
    """Requests that are filled in together (R)."""
    lengths: tuple[int, ...] = (256,)
    """Tokens of a row, ascending; a step takes the smallest that holds its requests, and the last
    is the most that prompt and answer may have."""
    budget: int = BUDGET
    """Positions whose logits are computed at a time (Q); it changes no token."""

    def __post_init__(self):
        lengths = self.lengths
        if not lengths or min(lengths) < 2 or sorted(set(lengths)) != [*lengths]:
            raise ValueError(f"lengths={lengths} must be one or more lengths above 1, ascending")
        for field in ("rows", "budget"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}={getattr(self, field)} must be at least 1")


def check_steps(field: str, steps_per_token: float) -> None:
    """Refuse a number of steps that no request needs.

    Args:
        field: Name of the field, for the message.
        steps_per_token: Steps for each token of an answer.

    Raises:
        ValueError: It is not above 0 and at most 1,000.
    """
    if not 0.0 < steps_per_token <= _MOST_STEPS:
        raise ValueError(f"{field}={steps_per_token} must be above 0 and at most {_MOST_STEPS}")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DiffusionConfig(InstancesConfig):
    """How requests of a masked-diffusion model are queued and filled in."""

    steps_per_token: float = 1.0
    """Steps of a request for each token of its answer, rounded up: fewer are faster, more are
    closer to the model's own distribution."""

    def __post_init__(self):
        InstancesConfig.__post_init__(self)
        check_steps("steps_per_token", self.steps_per_token)

    def instance(self, facts: Facts) -> RowsInstance:
        """Return an instance with rows."""
        if "rows" not in facts.capabilities:
            raise ValueError(
                "this executor computes pages from left to right, and DiffusionConfig fills rows:"
                " give the engine a jaxmoe.serve.engine.EngineConfig"
            )
        return RowsInstance(facts, steps_per_token=self.steps_per_token)

    def policy(self, facts: Facts) -> Batching:
        """Return the plan of every step: all rows, free ones taken in the order of the queue."""
        del facts
        return plan_rows

    def describe(self, facts: Facts) -> str:
        """Return a line on the rows."""
        return (
            f"rows     {facts.max_running} x {facts.max_length} tokens, steps per token"
            f" {self.steps_per_token:g}"
        )
