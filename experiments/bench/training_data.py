# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The batches that all sides of a training benchmark read.

The embedded corpus is the library of the running Python, so that sides with different Pythons would
read different text. The benchmark therefore writes the batches to a file.
"""

from __future__ import annotations

import pathlib

import numpy as np

from jaxmoe.data import CorpusConfig, Loader
from jaxmoe.data.batch import Batch


class TrainingData:
    """Batches of a file that `write_training_data` wrote."""

    def __init__(self, path: str):
        self._rows = np.load(path)

    def batch(self, number: int) -> Batch:
        """Return a batch by its number, from 0."""
        rows = self._rows[number]
        tokens, targets = rows[:, :-1], rows[:, 1:]
        return Batch(
            tokens=np.ascontiguousarray(tokens),
            targets=np.ascontiguousarray(targets),
            loss_weights=np.ones(targets.shape, np.float32),
        )


def write_training_data(path: str | pathlib.Path, steps: int, batch: int, length: int) -> None:
    """Write rows of this Python's embedded corpus, int32 [steps, batch, length + 1].

    Args:
        path: File, with the suffix `.npy`.
        steps: Number of batches.
        batch: Sequences of a step.
        length: Predictions of a sequence.
    """
    loader = Loader(CorpusConfig().build(), batch_size=batch, sequence_length=length, seed=0)
    batches = [loader.batch(number) for number in range(steps)]
    rows = [np.concatenate([b.tokens, b.targets[:, -1:]], axis=1) for b in batches]
    np.save(path, np.stack(rows))
