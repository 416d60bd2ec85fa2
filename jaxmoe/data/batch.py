# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Define the batch that one step of training or evaluation reads, and validate it on the host.

A row of S + 1 tokens gives S predictions: `tokens` are its first S, `targets` its last S, so that
`targets[b, s]` is the label of `tokens[b, :s + 1]`.

Batches are validated on the host because devices do not report bad ids: an id past the vocabulary
is clamped, a negative one wraps around, a 64-bit one loses its upper half, and each gives a finite
but wrong loss.

To add a field: `jaxmoe/data/batch.py` (the field, and its check in `validate_batch`),
`jaxmoe/data/loader.py` (its values). An array that only one objective reads needs no field: put it
into `Batch.extra`.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any

import flax.struct
import numpy as np

from jaxmoe.errors import JaxmoeError, printable
from jaxmoe.models.token_checks import check_tokens
from pallas_kernels.array_types import Array, Float, Int, Shaped

HostOrDeviceArray = Array | np.ndarray

EXTRA = "extra."
"""Prefix of the names that `Batch.arrays` gives to the arrays of `Batch.extra`."""


class DataError(JaxmoeError, ValueError):
    """Data, or a request for data, that cannot be used as it is.

    Args:
        lines: Lines of the message; control characters in a line are escaped.
    """

    def __init__(self, *lines: str):
        super().__init__("\n".join(map(printable, lines)))


# Not checked at run time: tree functions also fill a Batch with shapes, specs or micro-batches.
@typing.no_type_check
@flax.struct.dataclass
class Batch:
    """Rows of one step: numpy arrays on the host, jax arrays on devices."""

    tokens: Int[HostOrDeviceArray, "B S"]
    """Input token ids."""
    targets: Int[HostOrDeviceArray, "B S"]
    """Labels: the token that follows each of `tokens`."""
    loss_weights: Float[HostOrDeviceArray, "B S"]
    """Weight of each prediction in the mean loss; 0 leaves it out."""
    segment_ids: Int[HostOrDeviceArray, "B S"] | None = None
    """0 for padding, otherwise the document within the row, counted from 1. None: each row is one
    document without padding, which attention computes faster."""
    positions: Int[HostOrDeviceArray, "B S"] | None = None
    """Position within the document, from 0. None: 0 to S - 1 in every row."""
    mask_ratio: Float[HostOrDeviceArray, "B S"] | None = None
    """Share of a row's tokens that masked diffusion hides, the same along a row; set by
    `jaxmoe.contrib.diffusion.masked_diffusion`, not by loaders."""
    level: Int[HostOrDeviceArray, " B"] | None = None
    """Level of each row, the same for all rows of a micro-batch: no document of a row of S tokens
    crosses a multiple of 2^level S / N of them, where N devices share a row
    (`execution.sequence_parallel:levels`). -1: the rows of a micro-batch that is left out. None:
    documents may lie anywhere."""
    extra: dict[str, Shaped[HostOrDeviceArray, "B S ..."]] = dataclasses.field(default_factory=dict)
    """Further arrays per token, by name, for the objective: masks, advantages, task ids. They are
    validated, placed, reordered and cut into micro-batches and chunks like the other fields.
    `experts` [B S L K] are recorded experts, which routers replay (`jaxmoe.routing.replay`)."""

    def arrays(self) -> dict[str, HostOrDeviceArray]:
        """Return every array that is set, by field name; those of `extra` as `extra.<name>`."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        extra = {f"{EXTRA}{name}": array for name, array in fields.pop("extra").items()}
        return {name: array for name, array in fields.items() if array is not None} | extra

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, HostOrDeviceArray]) -> Batch:
        """Return the batch whose `arrays()` are these.

        Raises:
            TypeError: A name is not a field.
        """
        fields = {name: array for name, array in arrays.items() if not name.startswith(EXTRA)}
        names = arrays.keys() - fields.keys()
        return cls(**fields, extra={name[len(EXTRA) :]: arrays[name] for name in sorted(names)})


def check_batch(batch: Any, vocab_size: int, *, has_ids: bool = True) -> None:
    """Raise if a train step cannot read a batch.

    Args:
        batch: Argument of a caller.
        vocab_size: Number of token ids that the model has.
        has_ids: Whether to compare ids on devices, which waits for them; those of numpy arrays are
            compared at any rate.

    Raises:
        ValueError: It is no `Batch`, tokens or targets are no rows of ids, or an id is outside.
    """
    if not isinstance(batch, Batch):
        raise DataError(
            f"batch has type {type(batch).__name__}, which must be a jaxmoe.data.Batch: give"
            " Batch(tokens=..., targets=..., loss_weights=...), each [B, S]"
        )
    for name in ("tokens", "targets"):
        check_tokens(getattr(batch, name), vocab_size, f"batch.{name}", has_ids=has_ids)


def validate_batch(batch: Batch, vocab_size: int) -> None:
    """Raise if a device would accept the batch and compute a wrong loss from it.

    Args:
        batch: Arrays on this host.
        vocab_size: Number of token ids that the model has.

    Raises:
        DataError: Shapes differ, a dtype is not an integer (or, for the weights, a float), a token
            id is outside the vocabulary, or a loss weight is negative or not finite.
    """
    fields = {name: np.asarray(values) for name, values in batch.arrays().items()}
    shape = fields["tokens"].shape
    if len(shape) != 2:
        raise DataError(f"batch.tokens has shape {shape}, which must be [rows, positions]")
    for name, values in fields.items():
        _check_array(name, values, shape)
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


def _check_array(name: str, values: np.ndarray, shape: tuple[int, ...]) -> None:
    """Raise a DataError if an array of a batch has another shape or kind than its field.

    Args:
        name: Key of `Batch.arrays`.
        values: The array.
        shape: Shape of the tokens.
    """
    is_extra = name.startswith(EXTRA)
    shape = shape[:1] if name == "level" else shape
    if (values.shape[:2] if is_extra else values.shape) != shape:
        rule = "begin with" if is_extra else "be"
        raise DataError(
            f"batch.{name} has shape {values.shape}, which must {rule} that of batch.tokens, "
            f"{shape}"
        )
    if is_extra:
        kinds = (np.number, np.bool_)
        kind_text = "a number or boolean"
    elif name in ("loss_weights", "mask_ratio"):
        kinds = (np.floating,)
        kind_text = "a float"
    else:
        kinds = (np.integer,)
        kind_text = "an integer"
    if not any(np.issubdtype(values.dtype, kind) for kind in kinds):
        raise DataError(
            f"batch.{name} has dtype {values.dtype}, which must be {kind_text} type: "
            f"convert it where it is read"
        )


def _refuse_first(name: str, values: np.ndarray, is_bad: np.ndarray, reason: str) -> None:
    """Raise a DataError that names the first bad entry and counts all of them."""
    if is_bad.any():
        row, position = np.argwhere(is_bad)[0]
        raise DataError(
            f"batch.{name}[row {row}, position {position}] is {values[row, position]}, {reason} "
            f"({is_bad.sum()} of {is_bad.size} entries are wrong)"
        )
