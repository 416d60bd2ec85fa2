# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Generation with a window of layers on the device: the tokens of `generate`, and what is moved."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxmoe.contrib.layerwise.offload import LayerWindow, LayerWindowConfig
from jaxmoe.models.decode import generate, stream
from jaxmoe.models.sampling import SamplingConfig
from tests.jaxmoe.layers.test_mesh_invariance import values_of
from tests.support.models import FULL

MODEL = dataclasses.replace(FULL, num_layers=4)
PROMPTS = [[1, 2, 3, 4], [5, 6]]
TOKENS = 5


def windowed(size, sampling):
    """The tokens, and the store after them."""
    window = LayerWindow(size)
    given = {"num_tokens": TOKENS, "key": jax.random.key(1), "sampling": sampling}
    params = jax.device_get(values_of(MODEL))
    parts = list(stream(MODEL, params, PROMPTS, programs=window, at_once=3, **given))
    window.close()
    assert "MB moved" in str(window)
    return np.concatenate(parts, axis=1), window.store


@pytest.mark.parametrize("temperature", [0.0, pytest.param(0.9, marks=pytest.mark.slow)])
def test_tokens_of_a_window_are_those_of_the_whole_model(temperature):
    given = {"num_tokens": TOKENS, "key": jax.random.key(1), "temperature": temperature}
    wanted = generate(MODEL, values_of(MODEL), PROMPTS, **given)
    whole = sum(
        x.nbytes
        for name, y in values_of(MODEL).items()
        if "blocks" in name
        for x in jax.tree.leaves(y)
    )
    for size in (1, 2, 4):
        found, store = windowed(size, SamplingConfig(temperature=temperature))
        np.testing.assert_array_equal(found, wanted)
        assert store.peak_layers <= min(size + 1, 4) and store.asked == 4 * TOKENS
        if size == 4:
            assert store.moved_bytes == store.peak_bytes == whole, "each layer once"
        else:
            assert store.moved_bytes > (TOKENS - 1) * whole and store.peak_bytes < whole


@pytest.mark.parametrize("text", ["window", "window:0", "slots:4", "window:-1", "4"])
def test_what_is_no_window_is_refused(text):
    with pytest.raises(ValueError, match=f"layers={text} must"):
        LayerWindowConfig.parse(text)
