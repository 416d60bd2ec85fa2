# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Builds the data of `routers`: the same batches for every method, made once.

Each held-out batch of the mixture holds one language, equally many of every language: the counts of
such a batch are those of its language, and the mean over batches is that of the mixture.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np

from experiments.studies.data import (
    batches_of,
    check_vocabulary,
    digest_of,
    held_out_batches,
)
from experiments.studies.routers.config import ObjectiveName, RoutersConfig
from jaxmoe.data import Batch
from jaxmoe.data.synthetic import SyntheticSource

Batches = tuple[Batch, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoutersTask:
    """One kind of data: training batches of each seed, and the held-out batches of all."""

    name: str
    training: tuple[Batches, ...]
    """Batches of each seed, one per step."""
    held_out: Batches
    languages: tuple[int, ...] = ()
    """Language of each held-out batch; empty for text."""
    tokens_per_unit: float = 1.0
    """Tokens per byte of text, or per token."""
    floors: dict[ObjectiveName, float] = dataclasses.field(default_factory=dict)
    """Exact entropy in bits by objective, where it is known."""


def load_tasks(config: RoutersConfig) -> tuple[dict[str, RoutersTask], str]:
    """Return both tasks by name, and a digest of the data.

    Raises:
        ValueError: Data without bytes, too large a vocabulary, or too few rows.
    """
    first = config.training.seed
    length = config.training.sequence_length
    seeds = range(first, first + config.seeds)
    corpus = config.corpus.build(first)
    mixtures = [config.languages.build(seed) for seed in seeds]
    for field, source in (("corpus", corpus), ("languages", mixtures[0])):
        check_vocabulary(source, config.model, field=field)
    bytes_per_token = corpus.bytes_per_token
    if bytes_per_token is None:
        raise ValueError("corpus has no bytes, and is to be measured in bits per byte: give text")
    numbers, held_out = _held_out_languages(config, mixtures[0])
    tasks = {
        "corpus": RoutersTask(
            name="corpus",
            training=tuple(tuple(batches_of(corpus, config.training, seed)) for seed in seeds),
            held_out=held_out_batches(corpus, config.training, config.evaluation_batches),
            tokens_per_unit=1.0 / bytes_per_token,
        ),
        "languages": RoutersTask(
            name="languages",
            training=tuple(
                tuple(batches_of(source, config.training, seed))
                for source, seed in zip(mixtures, seeds, strict=True)
            ),
            held_out=held_out,
            languages=numbers,
            floors={
                "autoregressive": mixtures[0].entropy_bits_per_token(length),
                "masked_diffusion": mixtures[0].whole_row_bits_per_token(length),
            },
        ),
    }
    return tasks, digest_of([corpus, mixtures[0]])


def _held_out_languages(
    config: RoutersConfig, source: SyntheticSource
) -> tuple[tuple[int, ...], Batches]:
    """Return batches of one language each, in turn, and their languages."""
    number = len(source.chains)
    size = config.training.batch_size
    each = max(1, config.evaluation_batches // number)
    rows: list[list[np.ndarray]] = [[] for _ in range(number)]
    for tokens in _validation_rows(source, config.training.sequence_length):
        mine = rows[int(source.language_of(tokens[:1])[0])]
        if len(mine) < each * size:
            mine.append(tokens)
        if all(len(row) == each * size for row in rows):
            break
    languages = []
    batches = []
    for language, mine in enumerate(rows):
        for part in np.stack(mine).reshape(each, size, -1):
            inputs = jnp.asarray(part[:, :-1])
            targets = jnp.asarray(part[:, 1:])
            ones = jnp.ones(inputs.shape, jnp.float32)
            batches.append(Batch(tokens=inputs, targets=targets, loss_weights=ones))
            languages.append(language)
    return tuple(languages), tuple(batches)


def _validation_rows(source: SyntheticSource, length: int) -> Iterator[np.ndarray]:
    index = 0
    while True:
        yield source.row("validation", index, length).tokens
        index += 1
