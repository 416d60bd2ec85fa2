# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Interface of the tasks: questions of a step, and the score of an answer."""

from __future__ import annotations

import abc
import dataclasses
from typing import ClassVar

import numpy as np

from jaxmoe.errors import JaxmoeError


class RewardError(JaxmoeError, RuntimeError):
    """A function of the user gave no reward: it raised an exception, or returned something else."""


@dataclasses.dataclass(frozen=True, slots=True)
class Question:
    """A prompt and what its answers are compared with."""

    prompt: str
    """Text before the answer."""
    answer: str = ""
    """A right answer, or what the task compares with; empty where it needs none."""


class RewardTask(abc.ABC):
    """Questions and the rewards of answers; both depend on their arguments alone."""

    def prompts(self, step: int, number: int, seed: int) -> list[Question]:
        """Return the questions of a step, the same for equal arguments.

        Args:
            step: Steps done before.
            number: Questions to return.
            seed: Seed of the run.

        Raises:
            ValueError: An argument is negative, or number is 0.
        """
        if number < 1 or step < 0 or seed < 0:
            raise ValueError(
                f"prompts need number >= 1, step >= 0 and seed >= 0, and number={number},"
                f" step={step}, seed={seed}"
            )
        return self.draw(step, number, seed)

    @abc.abstractmethod
    def draw(self, step: int, number: int, seed: int) -> list[Question]:
        """Return the questions of a step; arguments are checked.

        Args:
            step: Steps done before.
            number: Questions to return.
            seed: Seed of the run.
        """

    @abc.abstractmethod
    def score(self, question: Question, text: str) -> float:
        """Return the reward of an answer, from 0 to 1.

        Args:
            question: Question of `prompts`.
            text: What the model wrote, whatever it is.
        """


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RewardBase(abc.ABC):
    """What the configs of all tasks share."""

    name: ClassVar[str]

    def check(self) -> None:
        """Raise a ValueError where a field that has no default is missing; reads no file."""
        return

    @abc.abstractmethod
    def build(self) -> RewardTask:
        """Return the task.

        Raises:
            ValueError: A file, a line or a name cannot be used.
        """


def generator(seed: int, step: int) -> np.random.Generator:
    """Return the random numbers of a step.

    Args:
        seed: Seed of the run.
        step: Steps done before.
    """
    return np.random.default_rng((seed, step))


def check_operators(field: str, operators: str) -> None:
    """Refuse operators that are none of + - * /, and an empty choice.

    Args:
        field: Dotted name, for the message.
        operators: One character for each.

    Raises:
        ValueError: Names the field.
    """
    if not operators or not set(operators) <= set("+-*/"):
        raise ValueError(f"{field}={operators!r} must be one or more of + - * /, such as '+-'")
