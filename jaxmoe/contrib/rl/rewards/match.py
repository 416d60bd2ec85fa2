# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Answers that equal a text, or that a regular expression finds, from a file of questions."""

from __future__ import annotations

import dataclasses
import re
from typing import ClassVar, Literal

from jaxmoe.contrib.rl.rewards.base import Question, RewardBase, RewardTask
from jaxmoe.contrib.rl.rewards.questions import check_path, epochs_of, read_questions

Compare = Literal["exact", "regex"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MatchConfig(RewardBase):
    """Questions from a file; 1 for an answer that matches that of the file, 0 for others."""

    name: ClassVar[str] = "match"

    path: str = ""
    """JSON lines with the fields "prompt" and "answer"."""
    compare: Compare = "exact"
    """exact: the text is the answer, but for spaces around both. regex: the answer is a regular
    expression, which is searched in the text."""

    def check(self) -> None:
        """Raise a ValueError where `path` is missing."""
        check_path(self.path)

    def build(self) -> RewardTask:
        """Return the task with the questions of the file.

        Raises:
            ValueError: The file cannot be used, or an answer is no regular expression.
        """
        questions = read_questions(self.path, needs_answer=True)
        return _Match(questions, self._patterns(questions))

    def _patterns(self, questions: list[Question]) -> dict[str, re.Pattern[str]]:
        """Return the compiled answers."""
        if self.compare == "exact":
            return {}
        patterns = {}
        for question in questions:
            try:
                patterns[question.answer] = re.compile(question.answer)
            except (re.error, OverflowError, RecursionError) as error:
                raise ValueError(
                    f"rl.reward.path={self.path}: the answer {question.answer[:40]!r} is no regular"
                    f" expression: {error}; correct it, or set rl.reward.compare to exact"
                ) from error
        return patterns


class _Match(RewardTask):
    """Patterns are empty where answers are compared."""

    def __init__(self, questions: list[Question], patterns: dict[str, re.Pattern[str]]):
        self._questions = questions
        self._patterns = patterns

    def draw(self, step: int, number: int, seed: int) -> list[Question]:
        """Return the questions of a step."""
        return epochs_of(self._questions, step, number, seed)

    def score(self, question: Question, text: str) -> float:
        """Return 1 for a match."""
        if self._patterns:
            return float(self._patterns[question.answer].search(text) is not None)
        return float(text.strip() == question.answer.strip())
