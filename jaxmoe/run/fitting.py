# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Fits the sizes of a run to its data, where its user has not set them, and says what it changes.

    model.vocab_size            raised to the token ids of the data; not of a model to begin with
    training.batch_size         lowered to the training rows
    evaluation.batch_size       lowered to the held-out rows
    evaluation.batches          lowered to the held-out batches

Without this a run is refused whose data are too small, or have too many token ids. A run that is
resumed keeps the sizes that it began with, also on other devices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from jaxmoe.data import Source
from jaxmoe.run.config import PretrainConfig


def fit_to_data(
    config: PretrainConfig,
    source: Source,
    fixed_fields: Collection[str],
    *,
    batch_shards: int,
    saved: Mapping[str, Any] | None = None,
) -> tuple[PretrainConfig, tuple[str, ...]]:
    """Return a config whose sizes fit its data, and a text on each field that has changed.

    Args:
        config: Configuration of a run.
        source: Its data.
        fixed_fields: Dotted paths of fields that stay.
        batch_shards: Devices that share a batch, which divide its rows.
        saved: `config.json` of a run that is resumed; None for a new one.
    """
    texts = []
    training = config.training
    length = training.sequence_length

    def change(config: PretrainConfig, field: str, value: int, reason: str) -> PretrainConfig:
        section, name = field.split(".")
        fields = (saved or {}).get(section)
        size = fields.get(name) if isinstance(fields, Mapping) else None
        if type(size) is int and size > 0:
            value = size  # to which the run was fitted before
        texts.append(f"{field}={value}, for {reason}")
        part = dataclasses.replace(getattr(config, section), **{name: value})
        sections: dict[str, Any] = {section: part}
        return dataclasses.replace(config, **sections)

    masks = config.model.vocab_size - training.objective.num_predicted(config.model)
    vocab_size = source.vocab_size + masks
    if "model.vocab_size" not in fixed_fields and config.checkpoint.initial is None:
        if vocab_size > config.model.vocab_size:
            reason = f"the data have {source.vocab_size} token ids"
            config = change(config, "model.vocab_size", vocab_size, reason)
    train_rows = source.num_rows("train", length)
    multiple = batch_shards * training.accumulation
    has_one_size = config.rl is None and training.batch_ramp is None
    if "training.batch_size" not in fixed_fields and has_one_size and train_rows is not None:
        size = train_rows // multiple * multiple
        if 0 < size < training.batch_size:
            reason = f"the train split has {train_rows} rows of {length} tokens"
            config = change(config, "training.batch_size", size, reason)
    rows = source.num_rows("validation", length)
    if rows is None:
        return config, tuple(texts)
    reason = f"the validation split has {rows} rows of {length} tokens"
    size = rows // batch_shards * batch_shards
    if "evaluation.batch_size" not in fixed_fields and 0 < size < config.held_out_batch_size:
        config = change(config, "evaluation.batch_size", size, reason)
    batches = rows // config.held_out_batch_size
    if "evaluation.batches" not in fixed_fields and 0 < batches < config.evaluation.batches:
        config = change(config, "evaluation.batches", batches, reason)
    return config, tuple(texts)
