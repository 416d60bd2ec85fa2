# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Growing batches: sizes, rate, and the rows that each step reads."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.data import DataError, Loader, MarkovConfig
from jaxmoe.data.batch_sizes import BatchSizes
from jaxmoe.optim import LinearConfig
from jaxmoe.training.accumulation import accumulation_of
from jaxmoe.training.batch_ramp import BatchRampConfig

SIZES = BatchSizes(((0, 2), (3, 4), (6, 8)))


def refusal(text, kind=ValueError):
    return pytest.raises(kind, match=f"^{re.escape(text)}$")


def test_rows_of_each_step_by_hand():
    assert [SIZES.rows(step) for step in range(9)] == [2, 2, 2, 4, 4, 4, 8, 8, 8]
    assert [SIZES.rows_before(step) for step in range(9)] == [0, 2, 4, 6, 10, 14, 18, 26, 34]
    plain = BatchSizes(((0, 5),))
    assert [plain.rows_before(step) for step in range(4)] == [0, 5, 10, 15]


def test_stages():
    assert BatchRampConfig().build(1000, 512) == BatchSizes(
        ((0, 64), (16, 128), (32, 256), (48, 512))
    )
    one = BatchRampConfig(fraction=0.5, stages=1)
    assert one.build(10, 6) == BatchSizes(((0, 3), (5, 6)))


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0])
def test_the_rate_follows_the_batch(exponent):
    ramp = BatchRampConfig(fraction=0.5, stages=2, exponent=exponent)
    sizes = ramp.build(8, 8)
    plain = LinearConfig(floor=0.2).build(8)
    scaled = ramp.scale_schedule(plain, sizes)
    for step in range(8):
        law = (sizes.rows(step) / 8) ** exponent
        found = float(scaled(jnp.int32(step)) / plain(jnp.int32(step)))
        assert found == pytest.approx(law, rel=1e-6)


def test_micro_batches_keep_their_size():
    """With 64 rows in 8 micro-batches of 8; a batch smaller than that is one by itself."""
    assert [accumulation_of(rows, 64, 8) for rows in (4, 8, 16, 32, 64)] == [1, 1, 2, 4, 8]
    assert [accumulation_of(rows, 64, 1) for rows in (8, 64)] == [1, 1]


def loader(sizes, batch_size=8):
    source = MarkovConfig().build(0)
    return Loader(source, batch_size=batch_size, sequence_length=8, seed=0, batch_sizes=sizes)


def test_no_row_is_read_twice_or_skipped():
    ramped, single = loader(SIZES), loader(None, batch_size=1)
    tokens = np.concatenate([ramped.batch(step).tokens for step in range(8)])
    assert len(tokens) == SIZES.rows_before(8)
    for number, row in enumerate(tokens):
        np.testing.assert_array_equal(row, single.batch(number).tokens[0])


def test_hosts_share_each_batch():
    ramped = loader(SIZES)
    for step in (0, 3, 7):
        parts = [ramped.batch(step, process_index=i, process_count=2).tokens for i in range(2)]
        np.testing.assert_array_equal(np.concatenate(parts), ramped.batch(step).tokens)
    with refusal(
        "batch_size=2 must be divisible by the number of hosts (4): choose a multiple of 4",
        DataError,
    ):
        ramped.batch(0, process_count=4)


def test_the_position_knows_of_the_ramp():
    assert loader(SIZES).fingerprint()["batch_sizes"] == [[0, 2], [3, 4], [6, 8]]
    assert "batch_sizes" not in loader(None).fingerprint()
    with refusal(
        "batch_sizes ends with 8 rows, and batch_size is 4: they must be the same", DataError
    ):
        loader(SIZES, batch_size=4)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: BatchRampConfig(stages=4).build(1000, 24),
            "training.batch_ramp.stages=4 halves training.batch_size=24 4 times, which leaves no"
            " whole number: choose a batch size that is a multiple of 16, or fewer stages",
        ),
        (
            lambda: BatchRampConfig().build(20, 16),
            "training.batch_ramp.fraction=0.05 of training.steps=20 is 1 steps, and must be at"
            " least 3, one for each of its stages: choose a larger fraction or fewer stages",
        ),
        (
            lambda: BatchRampConfig(fraction=1.0),
            "training.batch_ramp.fraction=1.0 must lie between 0 and 1",
        ),
        (lambda: BatchRampConfig(stages=0), "training.batch_ramp.stages=0 must be at least 1"),
        (
            lambda: BatchRampConfig(exponent=-0.5),
            "training.batch_ramp.exponent=-0.5 must lie between 0 and 1",
        ),
        (
            lambda: BatchSizes(((0, 4), (0, 8))),
            "stages=((0, 4), (0, 8)) must begin at step 0, each stage after the one before",
        ),
        (lambda: BatchSizes(((0, 0),)), "stages=((0, 0),): every batch needs at least one row"),
    ],
)
def test_what_is_refused(make, text):
    with refusal(text):
        make()
