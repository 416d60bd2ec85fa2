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


def refusal(error: ValueError) -> str:
    """Return the message of a refusal, which is the library's own and was raised outside tracing.

    Raises:
        AssertionError: The message is empty, long or JAX's, or was raised while tracing.
    """
    frames = traceback.extract_tb(error.__traceback__)
    text = str(error)
    assert frames[-1].filename.startswith(_OURS), f"not refused in words: {error!r}"
    traced = [frame.filename for frame in frames if "/jax/_src/" in frame.filename]
    assert not traced, f"refused while tracing: {error!r}"
    assert text and len(text) < 1500 and text.isprintable(), f"no sentence: {text!r}"
    return text
