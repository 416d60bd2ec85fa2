# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Tasks: prompts, and rewards of the answers to them."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import numpy as np

from jaxmoe.configs import registry_of


@dataclasses.dataclass(frozen=True, slots=True)
class Question:
    """A prompt and what its answers are compared with."""

    prompt: str
    answer: Any


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ArithmeticConfig:
    """Sums of small numbers."""

    name: ClassVar[str] = "arithmetic"

    largest: int = 9
    """Largest number."""

    def build(self) -> ArithmeticConfig:
        """Return the task."""
        return self

    def prompts(self, step: int, number: int, seed: int) -> list[Question]:
        """Return the questions of a step."""
        drawn = np.random.default_rng((seed, step)).integers(0, self.largest + 1, (number, 2))
        return [Question(f"{a}+{b}=", str(a + b)) for a, b in drawn.tolist()]

    def score(self, question: Question, text: str) -> float:
        """Return 1 for the sum."""
        return float(text.strip() == question.answer)


RewardConfig = ArithmeticConfig
REWARDS = registry_of(RewardConfig)
