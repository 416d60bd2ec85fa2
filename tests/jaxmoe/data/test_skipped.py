# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Skipped rows: no row is read twice, and no other row is lost, also where batches grow."""

import numpy as np
import pytest

from jaxmoe.data import DataError, Loader, MarkovConfig, SkippedRows
from jaxmoe.data.batch_sizes import BatchSizes


def _loader(**given) -> Loader:
    sizes = BatchSizes(((0, 2), (3, 4), (6, 8)))
    source = MarkovConfig().build(0)
    return Loader(source, batch_size=8, sequence_length=4, seed=0, batch_sizes=sizes, **given)


def _rows(loader, steps):
    sizes = loader.batch_sizes
    return [list(range(n := loader.first_row(t), n + sizes.rows(t))) for t in range(steps)]


@pytest.mark.parametrize("window", [(0, 0), (0, 4), (2, 3), (2, 6), (5, 9)])
def test_only_the_skipped_window_is_left_out(window):
    """The rows of some steps, counted in rows: later steps have larger batches."""
    first, last = window
    before = _rows(_loader(), 12)
    jumping = _loader().without_steps(first, last)
    after = _rows(jumping, 12)
    assert after[:first] == before[:first]
    bad = {row for rows in before[first : last + 1] for row in rows}
    read = [row for rows in after for row in rows]
    assert read == sorted(set(read)) and not bad & set(read)
    assert set(range(read[-1] + 1)) == bad | set(read)
    assert jumping.batch(first).tokens.shape == _loader().batch(first).tokens.shape
    np.testing.assert_array_equal(
        jumping.batch(first).tokens[0], jumping.row(after[first][0]).tokens[:-1]
    )


def test_second_skipped_window_around_the_first():
    """The first window stays skipped."""
    once = _loader().without_steps(4, 6)
    twice = once.without_steps(3, 5)
    bad = {row for t, rows in enumerate(_rows(_loader(), 7)) for row in rows if t >= 4}
    bad |= {row for t, rows in enumerate(_rows(once, 6)) for row in rows if t >= 3}
    read = [row for rows in _rows(twice, 12) for row in rows]
    assert not bad & set(read) and read == sorted(set(read))


def test_position_holds_skipped_windows_before_its_step():
    loader = _loader().without_steps(4, 4)
    assert "skipped" not in loader.position(4) and loader.position(5)["skipped"] == [[4, 4]]
    assert SkippedRows.from_json([[4, 4]]) == loader.skipped


@pytest.mark.parametrize(
    ("windows", "text"),
    [
        ([[3]], "must be a list of"),
        ([[1, True]], "must be a list of"),
        ({"a": 1}, "must be a list of"),
        ([[-1, 4]], "each window needs step >= 0"),
        ([[1, 0]], "needs step >= 0 and rows >= 1"),
        ([[5, 2], [1, 2]], "in the order of the steps"),
    ],
)
def test_invalid_skipped_rows_are_refused(windows, text):
    with pytest.raises(DataError, match=text):
        SkippedRows.from_json(windows)
