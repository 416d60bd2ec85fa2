# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Countdown: reach a target with given numbers, `3,5,7=22:`, answered by `3*5+7`.

Every number is used exactly once. A question is made from its solution, so that each has one.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np

from jaxmoe.contrib.rl.rewards.base import (
    Question,
    RewardBase,
    RewardTask,
    check_operators,
    generator,
)
from jaxmoe.contrib.rl.rewards.expressions import ExpressionError, parse

_MOST_NUMBERS = 8
_LARGEST = 10**6


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CountdownConfig(RewardBase):
    """Reach a target with given numbers, each used once; 1 for an expression that does."""

    name: ClassVar[str] = "countdown"

    numbers: int = 3
    """Numbers of a question."""
    largest: int = 9
    """Largest number; the smallest is 1."""
    operators: str = "+-*/"
    """Operators of the solutions that questions are made from; an answer may have all of them."""
    partial: float = 0.1
    """Reward of an expression that uses the numbers and misses the target."""

    def __post_init__(self):
        check_operators("rl.reward.operators", self.operators)
        if set(self.operators) == {"/"}:
            raise ValueError(
                "rl.reward.operators=/ leaves nothing for numbers that do not divide: add +, - or *"
            )
        for field, least, most in (("numbers", 2, _MOST_NUMBERS), ("largest", 1, _LARGEST)):
            if not least <= (value := getattr(self, field)) <= most:
                raise ValueError(f"rl.reward.{field}={value} must be from {least} to {most}")
        if not 0.0 <= self.partial < 1.0:
            raise ValueError(f"rl.reward.partial={self.partial} must be at least 0 and below 1")

    def build(self) -> RewardTask:
        """Return the task."""
        return _Countdown(self)


class _Countdown(RewardTask):
    def __init__(self, config: CountdownConfig):
        self._config = config

    def draw(self, step: int, number: int, seed: int) -> list[Question]:
        """Return the questions of a step."""
        rng = generator(seed, step)
        return [self._question(rng) for _ in range(number)]

    def score(self, question: Question, text: str) -> float:
        """Return 1 at the target, `partial` for another value, 0 for other numbers or no answer."""
        try:
            expression = parse(text.strip())
        except ExpressionError:
            return 0.0
        target = parse(question.answer)
        if sorted(expression.numbers) != sorted(target.numbers):
            return 0.0
        return 1.0 if expression.value == target.value else self._config.partial

    def _question(self, rng: np.random.Generator) -> Question:
        """Return a question with its solution; values stay whole and at least 0."""
        config = self._config
        drawn = rng.integers(1, config.largest + 1, config.numbers).tolist()
        parts = [(value, str(value)) for value in drawn]
        while len(parts) > 1:
            first, second = rng.permutation(len(parts))[:2].tolist()
            pair = parts[first], parts[second]
            remaining = [part for place, part in enumerate(parts) if place not in (first, second)]
            operator = str(rng.choice(list(config.operators)))
            parts = [*remaining, _join(*pair, operator, config.operators)]
        target, solution = parts[0]
        shown = ",".join(map(str, drawn))
        return Question(f"{shown}={target}:", solution.removeprefix("(").removesuffix(")"))


def _join(
    first: tuple[int, str], second: tuple[int, str], operator: str, operators: str
) -> tuple[int, str]:
    """Return two parts as one, the larger before the smaller.

    Args:
        first: Value and text.
        second: Value and text.
        operator: Operator between them.
        operators: Allowed ones, of which another takes the place of a division with a remainder.
    """
    (a, left_text), (b, right) = max(first, second), min(first, second)
    if operator == "/" and (b == 0 or a % b):
        operator = next(operator_name for operator_name in operators if operator_name != "/")
    values = {"+": a + b, "-": a - b, "*": a * b, "/": a // b if b else 0}
    return values[operator], f"({left_text}{operator}{right})"
