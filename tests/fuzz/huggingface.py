# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Draws odd and damaged Hugging Face directories: each is read, or refused in one sentence.

What is read has parameters of the shapes of its config, all finite.

To add a change: a function in CHANGES of `tests/fuzz/huggingface.py`.
"""

from __future__ import annotations

import copy
import json
import pathlib
from typing import Any

import jax
import numpy as np

from jaxmoe.checkpoint import CheckpointError, read_huggingface
from jaxmoe.checkpoint.huggingface.files import INDEX
from jaxmoe.scaling.initialize import parameter_table
from tests.fuzz.outcome import Outcome, is_likely, pick, sentence
from tests.support.damage import DAMAGE
from tests.support.huggingface_models import CONFIGS, read, write_directory

ODD: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    3,
    7,
    0.5,
    -0.0,
    1e-400,
    1e300,
    10**9,
    10**12,
    10**400,
    float("nan"),
    float("inf"),
    "",
    "1",
    "x",
    "\x00",
    "\u202e",
    "\u00e9" * 10,
    [],
    [1],
    [[]],
    {},
    {"type": "linear"},
    {"rope_type": "yarn", "factor": 0},
    {"a": {"b": {}}},
    [None] * 100,
)
"""Values of fields, of every type."""


def check(rng: np.random.Generator, place: pathlib.Path) -> Outcome:
    """Read a directory with one to three changes."""
    golden = read(pick(rng, tuple(CONFIGS)))
    config, state = copy.deepcopy(golden.config), dict(golden.state)
    for _ in range(rng.integers(1, 4)):
        pick(rng, CHANGES)(rng, config, state)
    shard_bytes = 1 << 30 if is_likely(rng, 0.5) else 30_000
    directory = write_directory(place / "model", config, state, shard_bytes)
    done = [pick(rng, ("files", "index", "none", "none"))]
    if done[0] == "files":
        files = sorted(path for path in directory.iterdir() if path.stat().st_size)
        pick(rng, DAMAGE)(pick(rng, files), rng)
    elif done[0] == "index" and (directory / INDEX).exists():
        index = json.loads((directory / INDEX).read_text())
        name = pick(rng, sorted(index["weight_map"]))
        index["weight_map"][name] = pick(rng, (*ODD, "../model/x", "/etc/passwd", name))
        (directory / INDEX).write_text(json.dumps(index))
    try:
        imported = read_huggingface(directory)
    except CheckpointError as error:
        return Outcome("refused", sentence(error, num_lines=30))
    table = parameter_table(imported.model)
    shapes = jax.tree.map(np.shape, imported.params)
    assert shapes == table.tree(lambda row: row.shape), "parameters of other shapes"
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(imported.params)), "not finite"
    return Outcome("read")


def change_field(rng: np.random.Generator, config: dict[str, Any], state: Any) -> None:
    """Give a field another value."""
    config[pick(rng, sorted(config))] = pick(rng, ODD)


def change_number(rng: np.random.Generator, config: dict[str, Any], state: Any) -> None:
    """Move a number by one, or double it."""
    numbers = [key for key, value in config.items() if type(value) in (int, float)]
    if numbers:
        key = pick(rng, sorted(numbers))
        config[key] = pick(rng, (config[key] + 1, config[key] - 1, config[key] * 2))


def remove_field(rng: np.random.Generator, config: dict[str, Any], state: Any) -> None:
    """Remove a field."""
    config.pop(pick(rng, sorted(config)), None)


def add_field(rng: np.random.Generator, config: dict[str, Any], state: Any) -> None:
    """Add a field of another family, or one that no family has."""
    other = pick(rng, tuple(CONFIGS.values()))
    config[pick(rng, (*sorted(other), "rope_scaling", "quantization_config", "x"))] = pick(rng, ODD)


def change_tensor(rng: np.random.Generator, config: Any, state: dict[str, np.ndarray]) -> None:
    """Remove, cut, transpose, rename or poison a tensor."""
    if not state:
        return
    name = pick(rng, sorted(state))
    values = state.pop(name)
    poisoned = values.copy()
    poisoned.flat[0] = pick(rng, (np.nan, np.inf, -np.inf))
    kinds = (values[:-1], values.T, values[None], values.ravel(), poisoned)
    kept = pick(rng, ((), *((name, array) for array in kinds), (f"{name}.x", values)))
    if kept:
        state[kept[0]] = np.ascontiguousarray(kept[1])


CHANGES = (change_field, change_number, remove_field, add_field, change_tensor)
