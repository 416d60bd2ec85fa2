# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The batch: what one step of training or evaluation reads, and the check on the host before it.

A row of S + 1 tokens gives S predictions: `tokens` are its first S, `targets` its last S, so that
`targets[b, s]` is what the model should say after `tokens[b, :s + 1]`.

The check exists because a device is silent: on it an id past the vocabulary is clamped, a negative
one wraps round, a 64-bit one loses its upper half, and each gives a finite, wrong loss.

To add a field: here with its shape, in `Loader.batch`, and in `validate_batch` what it may hold.
"""

from __future__ import annotations

import typing

import flax.struct
import numpy as np

from jaxmoe.errors import JaxmoeError
from pallas_kernels.array_types import Array, Float, Int

HostOrDeviceArray = Array | np.ndarray


class DataError(JaxmoeError, ValueError):
    """Data, or a request for data, that cannot be used as it is."""


# Not checked at run time: tree functions also fill a Batch with shapes, specs or micro-batches.
@typing.no_type_check
@flax.struct.dataclass
class Batch:
    """The rows of one step: numpy arrays on the host, jax arrays on the devices."""

    tokens: Int[HostOrDeviceArray, "B S"]
    """What the model reads."""
    targets: Int[HostOrDeviceArray, "B S"]
    """What it should predict: the token that follows each of `tokens`."""
    loss_weights: Float[HostOrDeviceArray, "B S"]
    """Weight of each prediction in the mean loss; 0 leaves it out."""
    segment_ids: Int[HostOrDeviceArray, "B S"] | None = None
    """0 for padding, otherwise the document within the row, counted from 1. None: each row is one
    document without padding, which attention computes faster."""
    positions: Int[HostOrDeviceArray, "B S"] | None = None
    """Position within the document, from 0. None: 0 to S - 1 in every row."""
    mask_ratio: Float[HostOrDeviceArray, "B S"] | None = None
    """Share of a row's tokens that masked diffusion hides, the same along a row; filled in by
    `jaxmoe.training.masked_diffusion`, not by loaders."""


def validate_batch(batch: Batch, vocab_size: int) -> None:
    """Refuses a batch that a device would accept and get silently wrong.

    Args:
        batch: Arrays on this host.
        vocab_size: Number of token ids that the model knows.

    Raises:
        DataError: Shapes differ, a dtype is not an integer (or, for the weights, a float), a token
            id is outside the vocabulary, or a loss weight is negative or not finite.
    """
    given = {name: getattr(batch, name) for name in Batch.__dataclass_fields__}
    fields = {name: np.asarray(values) for name, values in given.items() if values is not None}
    wanted = fields["tokens"].shape
    if len(wanted) != 2:
        raise DataError(f"batch.tokens has shape {wanted}, which must be [rows, positions]")
    for name, values in fields.items():
        if values.shape != wanted:
            raise DataError(
                f"batch.{name} has shape {values.shape}, which must be that of batch.tokens, "
                f"{wanted}"
            )
        kind, kind_name = (
            (np.floating, "a float")
            if name in ("loss_weights", "mask_ratio")
            else (np.integer, "an integer")
        )
        if not np.issubdtype(values.dtype, kind):
            raise DataError(
                f"batch.{name} has dtype {values.dtype}, which must be {kind_name} type: "
                f"convert it where it is read"
            )
    for name in ("tokens", "targets"):
        _refuse_first(
            name,
            fields[name],
            (fields[name] < 0) | (fields[name] >= vocab_size),
            f"outside the vocabulary of {vocab_size} (ids 0 to {vocab_size - 1}): use the "
            "tokenizer that the model was made for, or set the model's vocab_size to the data's",
        )
    weights = fields["loss_weights"]
    _refuse_first(
        "loss_weights",
        weights,
        ~(np.isfinite(weights) & (weights >= 0)),
        "which must be finite and not negative: 0 leaves a token out of the loss",
    )


def _refuse_first(name: str, values: np.ndarray, is_bad: np.ndarray, reason: str) -> None:
    """Raises a DataError that names the first bad entry and how many there are."""
    if is_bad.any():
        row, position = np.argwhere(is_bad)[0]
        raise DataError(
            f"batch.{name}[row {row}, position {position}] is {values[row, position]}, {reason} "
            f"({is_bad.sum()} of {is_bad.size} entries are wrong)"
        )
