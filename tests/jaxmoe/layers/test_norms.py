# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Norms: formulas, gradients, dtypes, initial values; models with each on meshes and decoded."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from jaxmoe.layers.norms import NORMS, CentredRmsNormConfig, LayerNormConfig, Norm, RmsNormConfig
from jaxmoe.models.config import ModelConfig
from jaxmoe.scaling.initialize import init_params, parameter_table
from tests.support.tolerances import assert_close

WIDTH = 6
EPSILON = 1e-2
CONFIGS = {
    "rms": RmsNormConfig(),
    "zero-centred rms": CentredRmsNormConfig(),
    "layer": LayerNormConfig(),
    "layer with bias": LayerNormConfig(has_bias=True),
}


def features():
    return jnp.asarray(np.random.default_rng(0).normal(1.0, 2.0, (2, 3, WIDTH)), jnp.float32)


def weights_of(config):
    rng = np.random.default_rng(1)
    return {
        name: jnp.asarray(rng.normal(0.5, 1.0, row.shape), jnp.float32)
        for name, row in config.declarations(WIDTH).items()
    }


def reference(name, x, weights):
    """The formula, one token after the other."""
    x = np.asarray(x, np.float64)
    y = np.empty_like(x)
    for place in np.ndindex(*x.shape[:-1]):
        token = x[place]
        if name.startswith("layer"):
            token = token - token.mean()
        token = token / np.sqrt((token**2).mean() + EPSILON)
        gain = np.asarray(weights["gain"], np.float64) + name.startswith("zero")
        y[place] = token * gain + np.asarray(weights.get("bias", 0.0))
    return y.astype(np.float32)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_norm_equals_its_formula(name):
    config = CONFIGS[name]
    weights = weights_of(config)
    y = Norm(WIDTH, EPSILON, config).apply({"params": weights}, features())
    assert_close(y, reference(name, features(), weights), "elementwise")


@pytest.mark.parametrize("name", CONFIGS)
def test_the_gradient_of_a_norm_is_that_of_small_differences(name):
    config = CONFIGS[name]
    weights, cotangent = weights_of(config), np.cos(np.arange(36.0)).reshape(2, 3, WIDTH)
    arguments = {"x": features(), **weights}

    def total(arguments):
        y = config.apply(arguments["x"], arguments, EPSILON)
        return jnp.sum(y * cotangent.astype(np.float32))

    gradients = jax.grad(total)(arguments)
    for key, array in arguments.items():
        slopes = np.empty(array.shape)
        for place in np.ndindex(*array.shape):
            ends = []
            for step in (1e-3, -1e-3):
                moved = dict(arguments, **{key: np.array(array, np.float64)})
                moved[key][place] += step
                plain = {k: np.asarray(v, np.float64) for k, v in moved.items()}
                ends.append(np.sum(_formula(name, plain) * cotangent))
            slopes[place] = (ends[0] - ends[1]) / 2e-3
        np.testing.assert_allclose(gradients[key], slopes, rtol=1e-3, atol=1e-3)


def _formula(name, arguments):
    x = arguments["x"]
    if name.startswith("layer"):
        x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON)
    return x * (arguments["gain"] + name.startswith("zero")) + arguments.get("bias", 0.0)


def test_a_layer_norm_equals_flax():
    x, weights = features(), weights_of(CONFIGS["layer with bias"])
    theirs = nn.LayerNorm(epsilon=EPSILON)
    wanted = theirs.apply({"params": {"scale": weights["gain"], "bias": weights["bias"]}}, x)
    y = CONFIGS["layer with bias"].apply(x, weights, EPSILON)
    assert_close(y, wanted, "elementwise")


@pytest.mark.parametrize("name", CONFIGS)
def test_a_norm_is_computed_in_f32_and_returned_in_the_dtype_of_its_input(name):
    config = CONFIGS[name]
    x, weights = jnp.asarray(features(), jnp.bfloat16), weights_of(config)
    y = config.apply(x, weights, EPSILON)
    wide = config.apply(x.astype(jnp.float32), weights, EPSILON)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(y, wide.astype(jnp.bfloat16))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_new_norm_has_the_factor_one_and_adds_nothing(name):
    model = dataclasses.replace(ModelConfig(num_layers=1, embed_dim=WIDTH), norm=CONFIGS[name])
    params = init_params(model, jax.random.key(0))
    y = model.norm.apply(features(), params["final_norm"], EPSILON)
    plain = {"gain": np.full(WIDTH, 0.0 if name.startswith("zero") else 1.0)}
    np.testing.assert_allclose(y, reference(name, features(), plain), rtol=1e-5, atol=1e-6)
    table = parameter_table(model)
    rows = [row for row in table if "norm/" in row.path and "attention/" not in row.path]
    assert {row.path.rsplit("/", 1)[1] for row in rows} == set(weights_of(CONFIGS[name]))
    assert {row.declaration.role for row in rows} == {"norm"}


def test_the_default_model_has_the_norm_rms():
    assert ModelConfig().norm == NORMS["rms"]() == RmsNormConfig()
