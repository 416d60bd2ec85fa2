# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Draws damage to the newest of two checkpoints: its bits are restored, or those of the other.

To add a kind of damage: a function in DAMAGE of `tests/support/damage.py`.
"""

from __future__ import annotations

import logging
import pathlib

import numpy as np

from jaxmoe.checkpoint import CheckpointManager, save_checkpoint
from tests.fuzz.outcome import Outcome, is_likely, pick
from tests.support.damage import DAMAGE


def check(rng: np.random.Generator, place: pathlib.Path) -> Outcome:
    """Damage one to three files of a step, and restore the newest state."""
    directory = place / "checkpoints"
    shapes = {f"w{i}": tuple(map(int, rng.integers(1, 80, 2))) for i in range(rng.integers(1, 6))}
    dtypes = {name: pick(rng, ("float32", "int32", "uint8")) for name in shapes}
    saved = {}
    for step in (1, 2):
        values = {name: 100 * rng.standard_normal(shape) for name, shape in shapes.items()}
        saved[step] = {"params": {name: x.astype(dtypes[name]) for name, x in values.items()}}
        save_checkpoint(directory, saved[step], step=step, config={})
    files = sorted(path for path in (directory / "2").rglob("*") if path.is_file())
    before = {path: path.read_bytes() for path in files}
    done = []
    for _ in range(pick(rng, (1, 1, 2, 3))):
        left = [path for path in files if path.exists() and path.stat().st_size]
        if left:
            kind, path = pick(rng, DAMAGE), pick(rng, left)
            kind(path, rng)
            done.append(f"{kind.__name__} {path.relative_to(directory)}")
    is_whole = all(path.exists() and path.read_bytes() == data for path, data in before.items())
    warned = _Warnings()
    logging.getLogger("jaxmoe").addHandler(warned)
    try:
        manager = CheckpointManager(directory)
        if is_likely(rng, 0.5):
            manager.damage(2)  # a look before changes nothing
        step, state = manager.restore_newest(saved[1])
        manager.close()
    finally:
        logging.getLogger("jaxmoe").removeHandler(warned)
    text = "; ".join(done)
    assert step is not None, text
    for name, values in saved[step]["params"].items():
        found = np.asarray(state["params"][name])
        assert found.tobytes() == values.tobytes(), f"silent damage of {name}: {text}"
    if step == 2:
        return Outcome("kept", text)
    assert not is_whole, f"step 2 was whole: {text}"
    assert any("2 is damaged" in line for line in warned.lines), f"no warning: {text}"
    assert not (directory / "2").exists(), f"the damaged step is still there: {text}"
    return Outcome("previous", text)


class _Warnings(logging.Handler):
    """Keeps the messages of warnings."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a message."""
        self.lines.append(record.getMessage())
