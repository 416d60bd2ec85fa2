# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Outcome of one draw, choices by a generator, and the test of a refusal."""

from __future__ import annotations

import pathlib
import traceback
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
_OURS = tuple(str(ROOT / name) for name in ("jaxmoe", "sharding", "pallas_kernels", "experiments"))


class Outcome(NamedTuple):
    """What became of a draw."""

    name: str
    """Word to count: equal, refused, ..."""
    text: str = ""
    """Details, one line."""


def pick(rng: np.random.Generator, options: Sequence[Any]) -> Any:
    """Return one of the options, unchanged."""
    return options[int(rng.integers(len(options)))]


def is_likely(rng: np.random.Generator, share: float) -> bool:
    """Return True in this share of the draws."""
    return bool(rng.random() < share)


def sentence(error: Exception, *, num_lines: int = 1) -> str:
    """Return the message of an error that a user reads: not empty, not long, printable.

    Args:
        error: Error of the library.
        num_lines: Largest number of lines.

    Raises:
        AssertionError: It is none.
    """
    text = str(error)
    lines = text.split("\n")
    is_short = 0 < len(text) < 1500 * num_lines and len(lines) <= num_lines
    assert is_short and all(map(str.isprintable, lines)), f"no sentence: {text[:2000]!r}"
    return lines[0]


def refusal(error: ValueError) -> str:
    """Return the message of a refusal, which is the library's own and was raised outside tracing.

    Raises:
        AssertionError: The message is empty, long or JAX's, or was raised while tracing.
    """
    frames = traceback.extract_tb(error.__traceback__)
    assert frames[-1].filename.startswith(_OURS), f"not refused in words: {error!r}"
    traced = [frame.filename for frame in frames if "/jax/_src/" in frame.filename]
    assert not traced, f"refused while tracing: {error!r}"
    return sentence(error)
