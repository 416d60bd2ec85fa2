# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Sums, differences, products and quotients of two numbers: `17+5=`, answered by `22`."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from jaxmoe.contrib.rl.rewards.base import (
    Question,
    RewardBase,
    RewardTask,
    check_operators,
    generator,
)

_MOST_DIGITS = 18


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ArithmeticConfig(RewardBase):
    """Calculate with two numbers; 1 for the right number, 0 for anything else."""

    name: ClassVar[str] = "arithmetic"

    operators: str = "+"
    """Operators to draw from, of + - * /; quotients have no remainder."""
    digits: int = 1
    """Digits of a number at most."""

    def __post_init__(self):
        check_operators("rl.reward.operators", self.operators)
        if not 1 <= self.digits <= _MOST_DIGITS:
            raise ValueError(f"rl.reward.digits={self.digits} must be from 1 to {_MOST_DIGITS}")

    def build(self) -> RewardTask:
        """Return the task."""
        return _Arithmetic(self)


class _Arithmetic(RewardTask):
    def __init__(self, config: ArithmeticConfig):
        self._config = config

    def draw(self, step: int, number: int, seed: int) -> list[Question]:
        """Return the questions of a step."""
        operators = self._config.operators
        limit = 10**self._config.digits
        rng = generator(seed, step)
        pairs = rng.integers(0, limit, (number, 2)).tolist()
        chosen = rng.integers(0, len(operators), number).tolist()
        return [
            _question(first, second, operators[which], limit)
            for (first, second), which in zip(pairs, chosen, strict=True)
        ]

    def score(self, question: Question, text: str) -> float:
        """Return 1 for the number, written without leading zeros."""
        return float(text.strip() == question.answer)


def _question(first: int, second: int, operator: str, limit: int) -> Question:
    """Return a question; of a quotient, `second` decides the divisor and `first` the result."""
    if operator == "/":
        divisor = max(second, 1)
        quotient = first % ((limit - 1) // divisor + 1)
        return Question(f"{divisor * quotient}/{divisor}=", str(quotient))
    results = {"+": first + second, "-": first - second, "*": first * second}
    return Question(f"{first}{operator}{second}=", str(results[operator]))
