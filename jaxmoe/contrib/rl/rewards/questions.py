# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Reads questions from JSON lines, and passes through them in epochs of random order."""

from __future__ import annotations

import numpy as np

from jaxmoe.contrib.rl.rewards.base import Question, generator
from jaxmoe.generation.prompts import read_records

_FIELD = "rl.reward.path"


def check_path(path: str) -> None:
    """Refuse an empty path.

    Args:
        path: File of questions.

    Raises:
        ValueError: It is empty.
    """
    if not path:
        raise ValueError(f'{_FIELD} is empty: give a file of JSON lines with the field "prompt"')


def read_questions(path: str, *, needs_answer: bool) -> list[Question]:
    """Return the questions of a file.

    Args:
        path: JSON lines with the fields "prompt" and "answer", both texts; others are not read.
        needs_answer: Whether each line must have an answer.

    Raises:
        ValueError: The file cannot be read, is empty, or a line has no prompt or answer, or
            one that is not a text.
    """
    check_path(path)
    fields = ("answer",) if needs_answer else ()
    records = read_records(path, _FIELD, fields, optional=("answer",))
    return [Question(record["prompt"], record.get("answer", "")) for record in records]


def epochs_of(questions: list[Question], step: int, number: int, seed: int) -> list[Question]:
    """Return the questions of a step: all of them once, in random order, then again in another.

    Args:
        questions: All questions.
        step: Steps done before.
        number: Questions of a step, the same at every step.
        seed: Seed of the run.
    """
    size = len(questions)
    first = step * number
    places = np.arange(first, first + number)
    orders = {
        epoch: generator(seed, epoch).permutation(size)
        for epoch in range(first // size, (first + number - 1) // size + 1)
    }
    return [questions[orders[place // size][place % size]] for place in places.tolist()]
