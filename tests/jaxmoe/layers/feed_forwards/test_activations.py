# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Every activation against its formula in Python floats: values, slopes, and where it is used.

To add an activation: its formula in FORMULAS.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.feed_forwards import (
    ACTIVATIONS,
    ClampedSwiGLUConfig,
    DenseConfig,
    GeGLUConfig,
    ReLUSquaredConfig,
    SwiGLUConfig,
)
from jaxmoe.layers.feed_forwards.dense import FeedForward
from tests.support.tolerances import assert_close

TOKENS, WIDTH, HIDDEN = 5, 8, 6


def sigmoid(x):
    return 1.0 / (1.0 + math.exp(-x))


def normal_below(x):
    return 0.5 * (1.0 + math.erf(x / math.sqrt(2.0)))


def by_tanh(x):
    return 0.5 * (1.0 + math.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


def clamped(gate, up, limit, alpha, offset):
    gate = min(gate, limit)
    return gate * sigmoid(alpha * gate) * (max(-limit, min(up, limit)) + offset)


FORMULAS = {
    "swiglu": (SwiGLUConfig(), lambda g, u: g * sigmoid(g) * u),
    "clamped_swiglu": (ClampedSwiGLUConfig(), lambda g, u: clamped(g, u, 7.0, 1.702, 1.0)),
    "clamped_swiglu of a low limit, without a shift": (
        ClampedSwiGLUConfig(limit=0.5, alpha=1.0, offset=0.0),
        lambda g, u: clamped(g, u, 0.5, 1.0, 0.0),
    ),
    "geglu": (GeGLUConfig(), lambda g, u: g * normal_below(g) * u),
    "geglu by tanh": (GeGLUConfig(is_approximate=True), lambda g, u: g * by_tanh(g) * u),
    "relu_squared": (ReLUSquaredConfig(), lambda u: max(u, 0.0) ** 2),
}


def test_every_activation_has_a_formula():
    assert {config.name for config, _ in FORMULAS.values()} == set(ACTIVATIONS)


@pytest.mark.parametrize("name", FORMULAS)
def test_values_and_slopes_equal_the_formula(name):
    """Slopes against differences of the formula in double precision."""
    config, formula = FORMULAS[name]
    drawn = 3.0 * np.random.default_rng(0).standard_normal((config.num_projections, 200))
    drawn[:, :2] = 9.0, -9.0  # beyond a limit of 7
    projections = tuple(jnp.asarray(row, jnp.float32) for row in drawn)
    hidden, back = jax.vjp(lambda *parts: config(parts.__getitem__), *projections)
    points = np.asarray(projections, np.float64).T
    values = np.array([formula(*point) for point in points])
    assert_close(hidden, values, "elementwise")
    for i, slopes in enumerate(back(jnp.ones_like(hidden))):
        step = np.zeros(len(projections))
        step[i] = 1e-5
        pairs = [(formula(*(p + step)), formula(*(p - step))) for p in points]
        differences = np.array([(upper - lower) / 2e-5 for upper, lower in pairs])
        assert_close(slopes, differences, "matmul")


@pytest.mark.parametrize("name", FORMULAS)
def test_hidden_units_keep_the_dtype_of_the_projections(name):
    config, _ = FORMULAS[name]
    one = jax.ShapeDtypeStruct((2, 3), jnp.bfloat16)
    projections = [one] * config.num_projections
    assert jax.eval_shape(lambda parts: config(parts.__getitem__), projections) == one


@pytest.mark.parametrize("name", FORMULAS)
def test_a_dense_layer_computes_its_activation(name):
    """Also the shape of its first matrix, which has a part for each projection."""
    config, formula = FORMULAS[name]
    dense = DenseConfig(hidden_dim=HIDDEN, activation=config)
    layer = FeedForward(WIDTH, HIDDEN, ExecutionConfig(), activation=dense.activation)
    rng = np.random.default_rng(1)
    x = rng.standard_normal((1, TOKENS, WIDTH))
    gate_up = rng.standard_normal((WIDTH, config.num_projections, HIDDEN))
    down = rng.standard_normal((HIDDEN, WIDTH))
    params = {"gate_up": gate_up, "down": down}
    arrays = jax.tree.map(lambda array: jnp.asarray(array, jnp.float32), params)
    y, _ = layer.apply({"params": arrays}, jnp.asarray(x, jnp.float32))
    projected = np.einsum("sd,dcf->scf", x[0], gate_up)
    hidden = np.array([[formula(*units) for units in token.T] for token in projected])
    assert_close(y[0], hidden @ down, "matmul")
    assert dense.sizes.num_projections == config.num_projections


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"limit": 0.0}, "activation.limit=0.0 must be above 0; inf clamps nothing"),
        ({"alpha": 0.0}, "activation.alpha=0.0 must be finite and above 0"),
    ],
)
def test_clamped_swiglu_refuses(fields, text):
    with pytest.raises(ValueError, match=text):
        ClampedSwiGLUConfig(**fields)
