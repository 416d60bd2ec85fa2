# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Muon against optax's, value by value, and against the oracle in its own form of momentum."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from jaxmoe.optim import muon
from jaxmoe.optim.matrices import matrices_of
from jaxmoe.optim.muon import scale_by_muon
from tests.support import muon_oracle
from tests.support.tolerances import assert_close

STEPS = 6
SHAPES = {"wide": (5, 7), "tall": (9, 4), "layers": (3, 4, 6), "experts": (2, 3, 6, 4)}
HEADS = {"q": (2, 6, 3, 2), "o": (2, 3, 2, 6)}
HEAD_AXES = {"q": ((-3,), (-2, -1)), "o": ((-3, -2), (-1,))}


def random(shapes, seed, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def train(optimizer, shapes, *, promotion="strict", steps=STEPS):
    """The parameters after every step of a given sequence of gradients."""
    params = jax.tree.map(jnp.asarray, random(shapes, 0))
    with jax.numpy_dtype_promotion(promotion):
        state, update, path = optimizer.init(params), jax.jit(optimizer.update), []
        for step in range(1, steps + 1):
            grads = jax.tree.map(jnp.asarray, random(shapes, step))
            updates, state = update(grads, state, params)
            params = jax.tree.map(jnp.add, params, updates)
            path.append(params)
    return path


def optax_muon(rate, dims, **options):
    return optax.contrib.muon(
        rate, muon_weight_dimension_numbers=dims, adam_learning_rate=0.0, **options
    )


def last_two(shapes):
    numbers = optax.contrib.MuonDimensionNumbers
    return {name: numbers(len(shape) - 2, len(shape) - 1) for name, shape in shapes.items()}


@pytest.mark.parametrize("coefficients", ["dion", "standard"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_equals_optax(coefficients, nesterov):
    ours = muon(
        lambda count: 0.1 / (count + 1),
        matrix_axes=(-2, -1),
        form="ema",
        nesterov=nesterov,
        coefficients=coefficients,
        scale="clip_norm",
        weight_decay=0.2,
    )
    theirs = optax_muon(
        lambda count: 0.1 / (count + 1),
        last_two(SHAPES),
        nesterov=nesterov,
        ns_coeffs=coefficients,
        weight_decay=0.2,
    )
    wanted = train(theirs, SHAPES, promotion="standard")
    assert_close(train(ours, SHAPES), wanted, "matmul")


def test_equals_optax_with_the_same_rms():
    ours = muon(0.1, matrix_axes=(-2, -1), form="ema", momentum=0.8, scale="rms_norm")
    theirs = optax_muon(0.1, last_two(SHAPES), beta=0.8, ns_coeffs="dion", consistent_rms=0.2)
    wanted = train(theirs, SHAPES, promotion="standard")
    assert_close(train(ours, SHAPES), wanted, "matmul")


def test_equals_optax_with_two_output_dimensions():
    numbers = optax.contrib.MuonDimensionNumbers
    dims = {"q": numbers((1,), (2, 3)), "o": numbers((1, 2), (3,))}
    ours = muon(0.1, matrix_axes=HEAD_AXES, form="ema", scale="clip_norm")
    wanted = train(optax_muon(0.1, dims, ns_coeffs="dion"), HEADS, promotion="standard")
    assert_close(train(ours, HEADS), wanted, "matmul")


def test_the_sum_form_equals_the_oracle():
    path = train(muon(0.1, matrix_axes=(-2, -1), momentum=0.9, weight_decay=0.3), SHAPES)
    for name in SHAPES:
        gradients = [random(SHAPES, step)[name] for step in range(1, STEPS + 1)]
        start = random(SHAPES, 0)[name]
        wanted = muon_oracle.muon(start, gradients, rate=0.1, momentum=0.9, decay=0.3)
        assert_close([params[name] for params in path], wanted, "matmul")


def test_momentum_forms_converge_after_the_first_steps():
    """The forms weight the last two gradients differently until mu^t vanishes."""
    one, other = (
        muon(0.1, matrix_axes=(-2, -1), momentum=0.5, form=form) for form in ("sum", "ema")
    )
    first, second = train(one, SHAPES, steps=30), train(other, SHAPES, steps=30)

    def steps(path, t):
        return jax.tree.map(lambda new, old: np.asarray(new - old), path[t], path[t - 1])

    assert_close(steps(first, 29), steps(second, 29), "matmul")
    assert np.abs(steps(first, 1)["wide"] - steps(second, 1)["wide"]).max() > 1e-3


@pytest.mark.parametrize(
    ("scale", "wanted"),
    [("spectral_norm", 2.0), ("rms_norm", 0.8), ("clip_norm", 2.0), (None, 1.0)],
)
@pytest.mark.parametrize("is_tall", [False, True])
def test_the_scale_depends_on_the_shape(scale, wanted, is_tall):
    """A matrix of 4 inputs and 16 outputs, and the other way round."""
    if is_tall:
        wanted = {"spectral_norm": 0.5, "clip_norm": 1.0}.get(scale, wanted)
    grads = jax.tree.map(jnp.asarray, random({"w": (16, 4) if is_tall else (4, 16)}, 0))
    plain, scaled = (muon(1.0, scale=s) for s in (None, scale))
    one, other = (o.update(grads, o.init(grads), grads)[0]["w"] for o in (plain, scaled))
    assert_close(other, wanted * one, "elementwise")


def test_momentum_is_f32_whatever_the_parameters():
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), random(SHAPES, 0))
    optimizer = muon(0.1, matrix_axes=(-2, -1))
    updates, state = jax.jit(optimizer.update)(params, optimizer.init(params), params)
    floats = [leaf for leaf in jax.tree.leaves((updates, state)) if leaf.ndim]
    assert len(floats) == 8 and {leaf.dtype for leaf in floats} == {jnp.dtype("float32")}


def test_newton_schulz_in_bfloat16():
    grads = jax.tree.map(jnp.asarray, random(SHAPES, 1))
    one, other = (muon(1.0, matrix_axes=(-2, -1), dtype=dtype) for dtype in ("float32", "bfloat16"))
    first, second = (o.update(grads, o.init(grads), grads)[0] for o in (one, other))
    for name in SHAPES:
        gap = np.linalg.norm(np.asarray(first[name] - second[name]))
        # Rounding of 2^-9 in every product, through slopes of up to 4.
        assert 1e-4 < gap / np.linalg.norm(np.asarray(first[name])) < 0.1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"momentum": 1.0}, "momentum=1.0 must lie in [0, 1)"),
        ({"form": "mean"}, "form='mean' must be one of sum, ema"),
        ({"coefficients": "quintic"}, "coefficients='quintic' must be one of dion, standard"),
        (
            {"scale": "width"},
            "scale='width' must be one of spectral_norm, rms_norm, clip_norm, None",
        ),
        ({"layout": "whole"}, "layout='whole' must be one of spread, gathered"),
    ],
)
def test_bad_arguments_are_refused(options, text):
    with pytest.raises(ValueError) as error:
        # Unwrapped: the tests' type checker would refuse a wrong name first.
        inspect.unwrap(scale_by_muon)(**options)
    assert str(error.value) == text


def test_a_negative_weight_decay_is_refused():
    with pytest.raises(ValueError, match=r"^weight_decay=-1.0 must be 0 or more, and finite$"):
        muon(0.1, weight_decay=-1.0)


@pytest.mark.parametrize("axes", [(-2, -1), {"norm": {"gain": None}, "w": (-2, -1)}])
def test_a_vector_is_refused_by_name(axes):
    params = {"norm": {"gain": jnp.ones(6)}, "w": jnp.ones((2, 2))}
    with pytest.raises(ValueError) as error:
        scale_by_muon(matrix_axes=axes).init(params)
    assert str(error.value) == (
        "muon moves matrices, and norm/gain of shape (6,) is none: give it to adamw, with"
        " optax.partition({'adamw': adamw(...), ...}, labels)"
    )


@pytest.mark.parametrize("axes", [(-2, -2), (-1, 2), ((-3, -2), (-1,))])
def test_missing_matrix_axes_are_refused(axes):
    with pytest.raises(ValueError) as error:
        matrices_of({"w": jnp.ones((2, 3))}, axes, "muon")
    assert str(error.value) == (
        f"w of shape (2, 3) has no matrix at the axes {axes}: give different dimensions between"
        " -2 and 1"
    )


@pytest.mark.parametrize(
    ("axes", "why"),
    [
        ((-2, -1, 0), ": it has no pair for w"),
        ("in", ": it has no pair for w"),
        ({}, ": it has no pair for w"),
        ({"w": (0, 1), "v": (0, 1)}, ": there is no parameter v"),
    ],
)
def test_matrix_axes_of_another_structure_are_refused(axes, why):
    with pytest.raises(ValueError) as error:
        matrices_of({"w": jnp.ones((2, 3))}, axes, "muon")
    assert str(error.value) == (
        f"matrix_axes={axes!r} of muon is neither a pair of dimensions, as (-2, -1), nor a tree of"
        f" pairs like the parameters{why}"
    )


def test_matrix_axes_may_cover_parameters_of_other_groups():
    params = {"gain": jnp.ones(6), "w": jnp.ones((2, 3))}
    labels = {"gain": "adamw", "w": "muon"}
    mine = muon(0.1, matrix_axes={"gain": None, "w": (1, 0)})
    optimizer = optax.partition({"muon": mine, "adamw": optax.sgd(0.5)}, labels)
    updates, _ = optimizer.update(params, optimizer.init(params), params)
    alone, w = muon(0.1, matrix_axes=(1, 0)), {"w": params["w"]}
    wanted, _ = alone.update(w, alone.init(w), w)
    assert_close(updates["w"], wanted["w"], "matmul")


def test_vectors_go_to_adamw_by_partition():
    params = {"gain": jnp.ones(6), "w": jnp.ones((2, 3))}
    labels = {"gain": "adamw", "w": "muon"}
    optimizer = optax.partition({"muon": muon(0.1), "adamw": optax.sgd(0.5)}, labels)
    updates, _ = jax.jit(optimizer.update)(params, optimizer.init(params), params)
    assert_close(updates["gain"], np.full(6, -0.5), "elementwise")
    alone = muon(0.1)
    wanted, _ = alone.update({"w": params["w"]}, alone.init({"w": params["w"]}), {"w": params["w"]})
    assert_close(updates["w"], wanted["w"], "matmul")
