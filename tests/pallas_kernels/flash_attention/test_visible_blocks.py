# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Compares the classes of blocks with the mask itself."""

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.flash_attention import visible_blocks
from pallas_kernels.flash_attention.mask import Rules, Tokens


def _plain_mask(rules, positions, segments):
    """Return the mask of mask.py in numpy."""
    distance = positions[0][:, None] - positions[1][None, :]
    is_visible = (distance >= 0) | (not rules.causal)
    is_visible &= rules.window is None or np.abs(distance) < rules.window
    if segments[0] is not None:
        is_visible &= segments[0][0][:, None] == segments[1][0][None, :]
    return is_visible


@settings(max_examples=50)
@given(data=st.data())
def test_blocks_are_what_the_mask_says(data):
    """HIDDEN and WHOLE are correct for any mask, and exact for plain positions."""
    s, u = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))
    blocks = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))
    rules = Rules(
        causal=data.draw(st.booleans()),
        window=data.draw(st.none() | st.integers(1, 20)),
        softcap=None,
        scale=1.0,
    )

    def drawn(length):
        values = data.draw(st.lists(st.integers(0, 30), min_size=length, max_size=length))
        return np.asarray(sorted(values) if data.draw(st.booleans()) else values, np.int32)

    positions = [None if data.draw(st.booleans()) else drawn(length) for length in (s, u)]
    segments = [drawn(length)[None] // 8 for length in (s, u)]
    tokens = Tokens(*positions, *(segments if data.draw(st.booleans()) else (None, None)))
    kinds = np.asarray(visible_blocks.kinds_of_blocks(rules, tokens, (s, u), blocks))
    filled = [
        np.arange(length) if x is None else x for x, length in zip(positions, (s, u), strict=True)
    ]
    is_visible = _plain_mask(rules, filled, tokens[2:])
    order, counts = (np.asarray(x)[0] for x in visible_blocks.list_visible(kinds))
    for i in range(kinds.shape[1]):
        for j in range(kinds.shape[2]):
            rows, columns = (
                slice(at * block, (at + 1) * block)
                for at, block in zip((i, j), blocks, strict=True)
            )
            tile, kind = is_visible[rows, columns], kinds[0, i, j]
            assert kind != visible_blocks.HIDDEN or not tile.any()
            is_full = (j + 1) * blocks[1] <= u
            assert kind != visible_blocks.WHOLE or (tile.all() and is_full)
            if all(x is None for x in tokens) and rules.window is None and is_full:
                assert (kind == visible_blocks.WHOLE) == tile.all()
                assert (kind == visible_blocks.HIDDEN) == (not tile.any())
        whole, met = counts[i]
        assert set(order[i, :whole]) == set(np.flatnonzero(kinds[0, i] == visible_blocks.WHOLE))
        assert set(order[i, whole:met]) == set(np.flatnonzero(kinds[0, i] == visible_blocks.MASKED))


def test_large_tables_are_computed_on_the_device(monkeypatch):
    rules = Rules(causal=True, window=9, softcap=None, scale=1.0)
    arguments = rules, Tokens(None, None, None, None), (64, 64), (4, 8)
    small = visible_blocks.kinds_of_blocks(*arguments)
    monkeypatch.setattr(visible_blocks, "MAX_CONSTANT", 10)
    large = visible_blocks.kinds_of_blocks(*arguments)
    assert isinstance(small, np.ndarray)
    assert isinstance(large, jax.Array)
    np.testing.assert_array_equal(small, large)
    for x, y in zip(
        visible_blocks.list_visible(small), visible_blocks.list_visible(large), strict=True
    ):
        np.testing.assert_array_equal(x, y)
