# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Each mixer against a loop over positions, documents alone, and its own steps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.records import LayerCache, TokenInputs
from jaxmoe.precision import PrecisionPolicy
from tests.jaxmoe.contrib.linear_attention.loops import LOOPS
from tests.jaxmoe.contrib.linear_attention.mixers import (
    BATCH,
    LENGTH,
    MIXERS,
    every_mixer,
    inputs,
    mix,
    mixer,
    module_of,
    params_of,
    segments_of,
)
from tests.support.tolerances import assert_close


@every_mixer
def test_value_and_gradient_equal_a_loop_over_positions(name):
    """The row has two documents and padding, whose outputs do not count."""
    config = MIXERS[name]
    segments = np.array([[1, 1, 2, 2, 2, 2, 2, 0]], np.int32)
    is_token = jnp.asarray(segments != 0)[..., None]

    def number(y):
        weights = jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)
        return jnp.sum(jnp.where(is_token, y * weights, 0.0))

    def layer(params, x):
        return number(mix(config, params, x, jnp.asarray(segments)))

    def loop(params, x):
        return number(LOOPS[name](config, params, x, segments))

    operands = (params_of(config), inputs()[:1, : segments.shape[1]])
    actual = jax.jit(jax.value_and_grad(layer, (0, 1)))(*operands)
    with jax.numpy_rank_promotion("allow"):
        desired = jax.jit(jax.value_and_grad(loop, (0, 1)))(*operands)
    assert_close(actual, desired, "end_to_end")


@every_mixer
def test_documents_in_a_row_equal_each_alone(name):
    x = inputs()
    mixed = mixer(name)
    row_outputs = mixed(x, jnp.asarray(segments_of()))
    single = jnp.ones((1, LENGTH), jnp.int32)
    for row, start, stop in ((0, 0, 9), (0, 9, 13), (0, 13, LENGTH), (1, 0, 17)):
        padding = ((0, 0), (0, LENGTH - stop + start), (0, 0))
        document = jnp.pad(x[row : row + 1, start:stop], padding)
        alone = mixed(document, single)[0, : stop - start]
        assert_close(row_outputs[row, start:stop], alone, "end_to_end")


@every_mixer
def test_no_token_sees_a_later_one(name):
    segments = jnp.ones((BATCH, LENGTH), jnp.int32)
    x = inputs()
    mixed = mixer(name)
    difference = mixed(x.at[:, 12].add(1.0), segments) - mixed(x, segments)
    assert float(jnp.abs(difference[:, :12]).max()) == 0.0
    assert float(jnp.abs(difference[:, 12:14]).max(axis=(0, 2)).min()) > 1e-6


@every_mixer
def test_steps_of_any_length_equal_the_whole(name):
    """Pieces of 7, 1 and 1 tokens; then a padded one, whose last token leaves the state."""
    x = inputs()
    config = MIXERS[name]
    variables = {"params": params_of(config)}
    expected = mixer(name)(x, jnp.ones((BATCH, LENGTH), jnp.int32))

    @jax.jit
    def step(x, mask, entries, first):
        positions = jnp.broadcast_to(first + jnp.arange(mask.shape[1]), mask.shape)
        tokens = TokenInputs(token_mask=mask, positions=positions)
        cache = LayerCache(entries=entries, layer=jnp.int32(1))
        y, outputs = module_of(config).apply(variables, x, tokens, cache)
        return y, outputs.cache

    entries = config.initial_cache(ExecutionConfig(), layers=2, batch=BATCH, slots=LENGTH)
    start = 0
    pieces = []
    for count in (7, 1, 1):
        mask = jnp.ones((BATCH, count), bool)
        y, entries = step(x[:, start : start + count], mask, entries, start)
        pieces.append(y)
        start += count
    assert_close(jnp.concatenate(pieces, axis=1), expected[:, :start], "end_to_end")
    padded = jnp.where(jnp.arange(8)[None, :, None] < 5, x[:, start : start + 8], 100.0)
    y, entries = step(padded, jnp.broadcast_to(jnp.arange(8) < 5, (BATCH, 8)), entries, start)
    assert_close(y[:, :5], expected[:, start : start + 5], "end_to_end")
    y, entries = step(x[:, start + 5 : start + 6], jnp.ones((BATCH, 1), bool), entries, start + 5)
    assert_close(y, expected[:, start + 5 : start + 6], "end_to_end")
    assert all(not part[0].any() for part in entries), "the other layer's part stays"


@every_mixer
def test_plans_count_projections_as_the_parameters_have_them(name):
    """All matrices between the stream and the state, and back."""
    config = MIXERS[name]
    sizes = {key: np.size(value) for key, value in params_of(config).items()}
    stream = [
        size
        for key, size in sizes.items()
        if not key.endswith(("_taps", "_bias", "bias", "taps", "norm", "a_log"))
    ]
    assert config.projection_parameters(inputs().shape[-1]) == sum(stream)
    short, long = (config.flops_per_token(length) for length in (16, 4096))
    assert short == long > 0
    split = config.activations(lambda axis: 2, itemsize=2)
    uncut = config.activations(lambda axis: 1, itemsize=2)
    assert split.kept < uncut.kept and split.projected < uncut.projected <= uncut.kept


@every_mixer
def test_products_in_few_bits_are_refused(name):
    text = f"execution.precision.weights=w8a16 is not for {MIXERS[name].name} layers"
    with pytest.raises(ValueError, match=text):
        MIXERS[name].check_precision(PrecisionPolicy(weights="w8a16"))


@pytest.mark.parametrize(
    ("name", "field", "value", "text"),
    [
        (
            "short_convolution",
            "num_channels",
            0,
            "short_convolution.num_channels=0 must be above 0",
        ),
        ("lightning", "decay_layers", 0, "lightning.decay_layers=0 must be above 0"),
        ("kimi_delta", "gate_rank", 0, "kimi_delta.gate_rank=0 must be above 0"),
        ("kimi_delta", "decay_floor", 0.0, "kimi_delta.decay_floor=0.0 must be below 0, or None"),
        ("rotary_lightning", "norm_groups", 3, "norm_groups=3 must divide lightning.num_heads=4"),
        ("rotary_lightning", "rotary_dim", 3, "rotary_dim=3 must be an even number from 2 to"),
        ("gated_delta", "key_dim", 0, "gated_delta.key_dim=0 must be above 0"),
        ("gated_delta", "num_key_heads", 3, "num_heads=8 must be a multiple of .*num_key_heads=3"),
    ],
)
def test_bad_sizes_are_refused(name, field, value, text):
    with pytest.raises(ValueError, match=text):
        type(MIXERS[name])(**{field: value})
