# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Validation of batches on the host."""

import re

import jax
import numpy as np
import pytest

from jaxmoe.data import Batch, DataError, validate_batch


def _batch(**changes) -> Batch:
    tokens = np.arange(8, dtype=np.int32).reshape(2, 4)
    fields = {
        "tokens": tokens,
        "targets": tokens + np.int32(1),
        "loss_weights": np.ones((2, 4), np.float32),
        "segment_ids": np.ones((2, 4), np.int32),
        "positions": np.tile(np.arange(4, dtype=np.int32), (2, 1)),
    }
    return Batch(**(fields | changes))


def _with(value, dtype: type = np.int64):
    tokens = np.zeros((2, 4), dtype)
    tokens[1, 2] = value
    return tokens


def test_good_batches_pass():
    validate_batch(_batch(), 9)
    validate_batch(jax.device_put(_batch()), 9)
    validate_batch(_batch(tokens=_with(8), loss_weights=np.zeros((2, 4), np.float32)), 9)


@pytest.mark.parametrize(
    ("field", "values", "message"),
    [
        (
            "tokens",
            _with(256),
            "batch.tokens[row 1, position 2] is 256, outside the vocabulary of 256 "
            "(ids 0 to 255): use the tokenizer that the model was made for, or set the model's "
            "vocab_size to the data's (1 of 8 entries are wrong)",
        ),
        ("targets", _with(-1), "batch.targets[row 1, position 2] is -1, outside the vocabulary"),
        ("tokens", _with(2**32 + 1), "is 4294967297, outside the vocabulary of 256"),
        ("tokens", _with(40000, np.uint16), "is 40000, outside the vocabulary of 256"),
        (
            "tokens",
            np.zeros((2, 4), np.float32),
            "batch.tokens has dtype float32, which must be an integer type: convert it",
        ),
        (
            "segment_ids",
            np.ones((2, 4), bool),
            "batch.segment_ids has dtype bool, which must be an integer type",
        ),
        (
            "loss_weights",
            np.ones((2, 4), np.int32),
            "batch.loss_weights has dtype int32, which must be a float type",
        ),
        (
            "loss_weights",
            _with(np.nan, np.float32),
            "batch.loss_weights[row 1, position 2] is nan, which must be finite and not negative",
        ),
        ("loss_weights", _with(np.inf, np.float32), "is inf, which must be finite"),
        ("loss_weights", _with(-0.5, np.float32), "is -0.5, which must be finite and not"),
        (
            "positions",
            np.zeros((2, 3), np.int32),
            "batch.positions has shape (2, 3), which must be that of batch.tokens, (2, 4)",
        ),
        ("tokens", np.zeros(4, np.int32), "batch.tokens has shape (4,), which must be [rows,"),
    ],
)
def test_bad_batches_are_refused(field, values, message):
    with pytest.raises(DataError, match=re.escape(message)):
        validate_batch(_batch(**{field: values}), 256)


EXTRA = {"task": np.zeros((2, 4), np.int32), "experts": np.zeros((2, 4, 3), np.int8)}


def test_extra_arrays_are_part_of_the_batch():
    batch = _batch(extra=EXTRA | {"is_answer": np.ones((2, 4), bool)})
    validate_batch(batch, 9)
    assert len(jax.tree.leaves(batch)) == 8
    assert batch.arrays().keys() >= {"tokens", "extra.task", "extra.experts"}
    assert "mask_ratio" not in batch.arrays()
    again = Batch.from_arrays(batch.arrays())
    assert jax.tree.all(jax.tree.map(np.array_equal, again, batch))
    with pytest.raises(TypeError, match="unheard"):
        Batch.from_arrays(batch.arrays() | {"unheard": batch.tokens})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.zeros((2, 3), np.int32), "has shape (2, 3), which must begin with that of"),
        (np.zeros((2, 4), "U1"), "has dtype <U1, which must be a number or boolean type"),
    ],
)
def test_bad_extra_arrays_are_refused(values, message):
    with pytest.raises(DataError, match=re.escape(f"batch.extra.task {message}")):
        validate_batch(_batch(extra=EXTRA | {"task": values}), 9)


def test_batch_is_a_pytree():
    shapes = jax.tree.map(lambda leaf: leaf.shape, _batch())
    assert shapes.tokens == (2, 4)
    assert len(jax.tree.leaves(_batch())) == 5
