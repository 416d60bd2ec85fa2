# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Rewards of a Python function of the user, such as a verifier of proofs or a reward model.

def reward(question, text):             # in rules.py of the working directory
    return 1.0 if question.answer in text else 0.0

jaxmoe rl ... reward:python --rl.reward.function rules:reward
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from jaxmoe.contrib.rl.rewards.base import Question, RewardBase, RewardError, RewardTask
from jaxmoe.contrib.rl.rewards.questions import check_path, epochs_of, read_questions

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PythonConfig(RewardBase):
    """Questions from a file; the reward of a function of your own."""

    name: ClassVar[str] = "python"

    function: str = ""
    """Import path module:function. It is called with the question, which has prompt and answer, and
    the text of the model, and returns a number from 0 to 1."""
    path: str = ""
    """JSON lines with the field "prompt" and optionally "answer"."""

    def check(self) -> None:
        """Raise a ValueError where `function` or `path` is missing."""
        module, colon, attribute = self.function.partition(":")
        names = [*module.split("."), *attribute.split(".")]
        if not colon or not all(name.isidentifier() for name in names):
            raise ValueError(
                f"rl.reward.function={self.function!r} must be module:function, such as"
                " rules:reward for the function reward in rules.py"
            )
        check_path(self.path)

    def build(self) -> RewardTask:
        """Return the task with the questions of the file; imports the function.

        Raises:
            ValueError: The file cannot be used, or there is no such function.
        """
        self.check()
        return _Python(self.function, self._found(), read_questions(self.path, needs_answer=False))

    def _found(self) -> Callable[[Question, str], Any]:
        """Return the function."""
        module, _, attribute = self.function.partition(":")
        try:
            with _working_directory():
                value: Any = importlib.import_module(module)
        except ImportError as error:
            raise ValueError(
                f"rl.reward.function={self.function}: {module} cannot be imported: {error}; run the"
                " command in its directory, or add that to PYTHONPATH"
            ) from error
        for name in attribute.split("."):
            value = getattr(value, name, None)
        if not callable(value):
            raise ValueError(
                f"rl.reward.function={self.function}: {module} has no function {attribute}"
            )
        return value


@contextlib.contextmanager
def _working_directory() -> Iterator[None]:
    """Let modules of the working directory be imported within, after those of everywhere else.

    `python` looks there by itself, a command such as `jaxmoe` does not.
    """
    before = [*sys.path]
    sys.path.append(os.getcwd())
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path[:] = before


class _FunctionErrors:
    """Turns an exception of the user's code within, of any kind, into a `RewardError`."""

    def __init__(self, field: str, given: str):
        self._field = field
        self._given = given

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        del kind, trace
        if isinstance(error, Exception):
            logger.error("%s raised an exception", self._field, exc_info=error)
            message = f"{self._field} raised {type(error).__name__}: {error}, {self._given}"
            raise RewardError(message) from error


class _Python(RewardTask):
    def __init__(
        self, name: str, function: Callable[[Question, str], Any], questions: list[Question]
    ):
        self._name = name
        self._function = function
        self._questions = questions

    def draw(self, step: int, number: int, seed: int) -> list[Question]:
        """Return the questions of a step."""
        return epochs_of(self._questions, step, number, seed)

    def score(self, question: Question, text: str) -> float:
        """Return what the function returns.

        Raises:
            RewardError: The function raised an exception, or returned no number from 0 to 1.
        """
        field = f"rl.reward.function={self._name}"
        given = f"for the text {text[:40]!r}"
        with _FunctionErrors(field, given):
            value = self._function(question, text)
            try:
                reward = float(value)
            except (TypeError, ValueError, OverflowError):
                reward = math.nan
        if not 0.0 <= reward <= 1.0:
            raise RewardError(
                f"{field} must return a number from 0 to 1, and it returned {repr(value)[:40]}"
                f" {given}"
            )
        return reward
