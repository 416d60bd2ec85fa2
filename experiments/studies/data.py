# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Data of a study: the same source, held-out batches and digest for every trial."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

from experiments.studies.trials import on_device
from jaxmoe.data import Batch, Loader, Source, evaluation_batches
from jaxmoe.models.config import ModelConfig
from jaxmoe.run.config import TrainingConfig


def check_vocabulary(
    source: Source, model: ModelConfig, *, num_masks: int = 0, field: str = "the data"
) -> None:
    """Refuse data with more token ids than the model has.

    Args:
        source: Source of the data.
        model: Model that reads it.
        num_masks: Token ids that the objective needs beside those of the data.
        field: Name of the data in the error.

    Raises:
        ValueError: The vocabulary of the model is too small.
    """
    needed = source.vocab_size + num_masks
    if needed > model.vocab_size:
        masks = f" and {num_masks} for masks" if num_masks else ""
        raise ValueError(
            f"model.vocab_size={model.vocab_size} is smaller than the vocabulary of"
            f" {field} ({source.vocab_size}{masks}): give --model.vocab_size {needed}"
        )


def digest_of(sources: Sequence[Source]) -> str:
    """Return the sha256 of the fingerprints of some sources."""
    prints: Any = [source.fingerprint() for source in sources]
    text = json.dumps(prints[0] if len(prints) == 1 else prints, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def held_out_batches(
    source: Source, training: TrainingConfig, num_batches: int
) -> tuple[Batch, ...]:
    """Return held-out batches on the device.

    Raises:
        ValueError: Too little held-out data.
    """
    rows = evaluation_batches(
        source,
        batch_size=training.batch_size,
        sequence_length=training.sequence_length,
        num_batches=num_batches,
    )
    return tuple(map(on_device, rows))


def loader_of(source: Source, training: TrainingConfig, seed: int) -> Loader:
    """Return the loader of one training."""
    return Loader(
        source,
        batch_size=training.batch_size,
        sequence_length=training.sequence_length,
        seed=seed,
    )


def batches_of(source: Source, training: TrainingConfig, seed: int) -> Iterator[Batch]:
    """Yield the batches of one training on the device, one per step."""
    loader = loader_of(source, training, seed)
    return (on_device(loader.batch(step)) for step in range(training.steps))
