# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Kinds of draws, and one draw of a kind, which depends on its seed and index alone.

To add a kind: a file in `tests/fuzz/` with `check(rng, place)`, and a row in KINDS of
`tests/fuzz/draws.py`.
"""

from __future__ import annotations

import importlib
import pathlib
import tempfile
import traceback

import jax
import numpy as np

from tests.fuzz.outcome import Outcome

KINDS = (
    "meshes",
    "pipelines",
    "pairs",
    "traces",
    "rows",
    "huggingface",
    "checkpoints",
    "data",
    "names",
)
"""Modules of `tests/fuzz/` with `check(rng, place)`."""


class Failure(AssertionError):
    """A draw that failed, with the command that repeats it."""


def run(kind: str, seed: int, index: int) -> Outcome:
    """Run one draw in an empty directory.

    Args:
        kind: Name in KINDS.
        seed: Seed of the draws.
        index: Number of the draw.

    Raises:
        Failure: The property does not hold, or something else than a refusal was raised.
    """
    check = importlib.import_module(f"tests.fuzz.{kind}").check
    rng = np.random.default_rng((seed, index))
    try:
        with tempfile.TemporaryDirectory() as place:
            return check(rng, pathlib.Path(place))
    except Exception as error:
        again = f"python -m tests.fuzz --kind {kind} --seed {seed} --first {index} --draws 1"
        text = "".join(traceback.format_exception(error))
        raise Failure(f"{again}\n{text}") from error
    finally:
        jax.clear_caches()
