# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The command that prices attention by level: lengths, table, ratio."""

import dataclasses

import numpy as np
import pytest

from experiments.levels import RECIPES, LengthsConfig, compare, draw_rows
from sharding import MeshConfig


def test_rows_hold_lengths_of_the_distribution():
    lengths = LengthsConfig(median=20.0, sigma=1.0, steps=3, seed=1)
    steps = draw_rows(lengths, 256, 8)
    assert len(steps) == 3 and all(len(rows) == 8 for rows in steps)
    assert all(1 <= length <= 256 for rows in steps for row in rows for length in row)
    assert all(sum(row) <= 256 for rows in steps for row in rows)
    drawn = np.array([length for rows in steps for row in rows for length in row])
    assert 14 < np.median(drawn) < 28
    assert steps == draw_rows(lengths, 256, 8)


@pytest.mark.parametrize("field", ["median", "sigma"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_distribution_without_numbers_is_refused(field, value):
    with pytest.raises(ValueError, match=f"lengths.{field}={value} .*both finite"):
        LengthsConfig(**{field: value})


def test_no_packing_by_level_takes_longer_than_static_and_long_documents_cost_the_same():
    config = RECIPES["tiny"]()
    training = dataclasses.replace(
        config.training, sequence_length=4096, batch_size=4, accumulation=4
    )
    execution = dataclasses.replace(config.execution, mesh=MeshConfig(data=1, seq=4))
    config = dataclasses.replace(config, topology="cpu:4", training=training, execution=execution)
    short = LengthsConfig(median=64.0, sigma=0.5, steps=2)
    table, found = compare(dataclasses.replace(config, lengths=short))
    assert [row[0] for row in table[1:]] == ["static", "buckets", "milp", "zones"]
    assert all(one.seconds <= one.static * (1 + 1e-9) for one in found.values())
    # On a device each they would take a fifth micro-batch.
    assert found["buckets"].shares == {1: 0.0, 2: 0.0, 4: 1.0}
    assert found["buckets"].micro_batches == found["buckets"].static_micro_batches
    assert found["milp"].seconds <= min(found["buckets"].seconds, found["zones"].seconds)
    long = LengthsConfig(median=1e6, sigma=0.0, steps=1)
    _, found = compare(dataclasses.replace(config, lengths=long))
    for one in found.values():
        assert one.shares[4] == 1.0
        np.testing.assert_allclose(one.static, one.seconds)
