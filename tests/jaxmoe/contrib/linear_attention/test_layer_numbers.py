# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Decays of lightning attention by layer: the numbers of layers in scans are those of the model."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.contrib.linear_attention.lightning import LightningConfig
from jaxmoe.layers.mixers import AttentionConfig
from jaxmoe.layers.records import LayerInputs
from jaxmoe.models.config import LayerConfig, ModelConfig
from jaxmoe.models.layer_scan import scan_inputs

ATTENTION = AttentionConfig(num_heads=4, num_kv_heads=4, head_dim=4)


def model_of(mixers, **fields):
    layers = tuple(LayerConfig(mixer=mixer) for mixer in mixers)
    return ModelConfig(
        **{"num_layers": len(mixers), "embed_dim": 16, "moe": None, "dense_dim": 16, **fields},
        attention=ATTENTION,
        layers=layers,
    )


def rate_by_equation(head, layer, heads, layers):
    base = 1 / 2 ** (8 / heads)
    return base ** (head + 1) * (1 - layer / (layers - 1 + 1e-5) + 1e-5)


@pytest.mark.parametrize("kinds", ["la", "lalalal", "llallallall", "l", "lll", "aallll", "lllla"])
def test_each_layer_has_the_decay_of_its_number(kinds):
    """`l` is lightning and `a` attention; periods, with and without layers behind them."""
    lightning = LightningConfig(num_heads=4, head_dim=4, decay_layers=len(kinds))
    mixers = LightningConfig.number_layers(
        [lightning if kind == "l" else ATTENTION for kind in kinds]
    )
    model = model_of(mixers)
    rates = {}
    for scan in model.scans:
        inputs = scan_inputs(model, scan, {}, None)
        for place, stack in enumerate(scan.stacks):
            mixer = stack.kind.mixer
            numbers = (inputs[str(place)] if scan.is_cycle else inputs).stack_layer
            if isinstance(mixer, LightningConfig):
                for layer, number in zip(stack.layers, numbers, strict=True):
                    inputs_of_layer = LayerInputs(
                        router_state={}, key=None, stack_layer=number, moe_layer=number
                    )
                    rates[layer] = mixer.rates(inputs_of_layer)
    assert sorted(rates) == [layer for layer, kind in enumerate(kinds) if kind == "l"]
    for layer, rate in rates.items():
        desired = [rate_by_equation(head, layer, 4, len(kinds)) for head in range(4)]
        np.testing.assert_allclose(rate, desired, rtol=2e-6, atol=1e-7)


def test_periods_stay_one_scan():
    """Numbers by place in the period leave 12 layers in a loop of 4 iterations."""
    lightning = LightningConfig(num_heads=4, head_dim=4, decay_layers=12)
    mixers = LightningConfig.number_layers([lightning, lightning, ATTENTION] * 4)
    (scan,) = model_of(mixers[:3], num_layers=12).scans
    assert scan.length == 4 and len(scan.stacks) == 3
    assert model_of(mixers).scans == (scan,)


def test_wrong_numbers_are_refused():
    lightning = LightningConfig(num_heads=4, head_dim=4, decay_layers=4)
    text = "layer 0 of 1 periods of 2 layers, and its decay .*number_layers fill both in"
    with pytest.raises(ValueError, match=text):
        model_of([lightning, ATTENTION], num_layers=4)
    with pytest.raises(ValueError, match="layer 0 of 2 periods of 1 layers"):
        model_of([lightning, lightning, ATTENTION, lightning])
    model_of([dataclasses.replace(lightning, decay_layers=None), ATTENTION], num_layers=4)
    with pytest.raises(ValueError, match="lightning.first_layer=4 must be in 0 to 3"):
        dataclasses.replace(lightning, first_layer=4)


def test_without_a_depth_every_layer_has_the_decay_of_the_first():
    config = LightningConfig(num_heads=4)
    inputs = LayerInputs(
        router_state={}, key=None, stack_layer=jnp.int32(3), moe_layer=jnp.int32(0)
    )
    np.testing.assert_array_equal(config.rates(inputs), config.rates(None))
    np.testing.assert_allclose(config.rates(None), 2.0 ** -np.array([2, 4, 6, 8]), rtol=2e-6)
