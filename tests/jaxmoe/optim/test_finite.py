# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Optimisers that say so stay finite under gradients at the ends of float32.

The norm of all gradients is finite, which is what the guard sees before an update. Adam's
direction is at most |first moment| / epsilon, far below overflow; Newton-Schulz and the sphere
divide by norms that are at least their own epsilon; an infinite norm of finite numbers gives zeros.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmoe.optim import OPTIMIZERS, adamh, adamw, muon, muonh
from jaxmoe.optim.steps import FiniteTransformation
from jaxmoe.training.guard import all_finite

STEPS = 40
SHAPES = {"one": (6, 4), "stack": (2, 4, 6)}
LARGEST = 1e18
"""Its square fits in float32 some hundred times."""
MAGNITUDES = {
    "zeros": (0.0,),
    "largest": (LARGEST,),
    "subnormal": (1e-42,),
    "spike_then_zeros": (LARGEST, *(0.0,) * (STEPS - 1)),
    "spike_then_tiny": (LARGEST, *(1e-30,) * (STEPS - 1)),
    "tiny_then_spike": (*(1e-30,) * (STEPS - 1), LARGEST),
    "in_turn": (LARGEST, 1e-30, 0.0, 1.0),
}
OPTIMISERS = {
    "adamw": lambda: adamw(0.1, weight_decay=0.1),
    "adamw_slow_first_moment": lambda: adamw(0.1, beta1=0.999, beta2=0.1),
    "adamh": lambda: adamh(0.1, matrix_axes=(-2, -1)),
    "muon": lambda: muon(0.1, matrix_axes=(-2, -1)),
    "muonh": lambda: muonh(0.1, matrix_axes=(-2, -1)),
}


def gradients(magnitude, step):
    """One matrix of each tree has the magnitude, the other that of a quiet layer."""
    rng = np.random.default_rng(step)
    found = {name: rng.choice([-1.0, 1.0], shape) for name, shape in SHAPES.items()}
    found["one"] *= magnitude
    found["stack"][0] *= magnitude
    return {name: jnp.asarray(value, jnp.float32) for name, value in found.items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", OPTIMISERS)
def test_state_and_parameters_stay_finite(name, dtype):
    optimizer = OPTIMISERS[name]()
    assert isinstance(optimizer, FiniteTransformation)

    @jax.jit
    def step(params, state, grads):
        norm = optax.tree.norm(grads)
        updates, state = optimizer.update(grads, state, params)
        params = jax.tree.map(lambda p, u: p + u.astype(p.dtype), params, updates)
        return params, state, jnp.isfinite(norm), all_finite((params, state))

    for case, magnitudes in MAGNITUDES.items():
        rng = np.random.default_rng(0)
        params = {
            name: jnp.asarray(rng.standard_normal(shape), dtype) for name, shape in SHAPES.items()
        }
        state = optimizer.init(params)
        for number in range(STEPS):
            magnitude = magnitudes[number % len(magnitudes)]
            params, state, *good = step(params, state, gradients(magnitude, number))
            assert all(map(bool, good)), (case, number)


def test_which_say_so():
    found = {name for name, config in OPTIMIZERS.items() if config.stays_finite}
    assert found >= {"adamw", "muon", "muonh"} and "mkor" not in found


def test_a_tiny_epsilon_does_not():
    """A spike that the second moment has forgotten over an epsilon of 1e-38."""
    optimizer = adamw(0.1, beta1=0.999, beta2=0.1, epsilon=1e-38)
    assert not isinstance(optimizer, FiniteTransformation)
    params = {"one": jnp.ones((6, 4))}
    state = optimizer.init(params)
    for number in range(120):
        grads = {"one": jnp.full((6, 4), 0.0 if number else LARGEST)}
        updates, state = optimizer.update(grads, state, params)
    assert not bool(all_finite(updates))
