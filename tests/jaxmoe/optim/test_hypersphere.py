# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Steps on spheres: constant norm, step by the learning rate, no effect of decay; MuonH and AdamH
against a loop over matrices in numpy."""

import functools
import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmoe.checkpoint import load_checkpoint, save_checkpoint
from jaxmoe.optim import adamh, muonh
from jaxmoe.optim.hypersphere import on_sphere
from tests.support import muon_oracle
from tests.support.tolerances import assert_close

OPTIMIZERS = {
    "muonh": (functools.partial(muonh, matrix_axes=(-2, -1)), muon_oracle.muonh),
    "adamh": (functools.partial(adamh, matrix_axes=(-2, -1)), muon_oracle.adamh),
}
DIRECTIONS = {"muonh": muon_oracle.muon_directions, "adamh": muon_oracle.adam_directions}
every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)
every_sphere = pytest.mark.parametrize("sphere", ["matrix", "stack"])

SHAPES = {"matrix": (5, 7), "layers": (3, 6, 4), "experts": (2, 3, 4, 6)}


def random(shapes, seed):
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(s).astype(np.float32) for name, s in shapes.items()}


def on_device(tree):
    return jax.tree.map(jnp.asarray, tree)


def norms(x):
    """Return the norm of every matrix, summed in float64."""
    return np.sqrt(np.sum(np.asarray(x, np.float64) ** 2, axis=(-2, -1)))


def train(optimizer, start, gradients):
    """The parameters after every step."""
    params, path = on_device(start), []
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for grads in gradients:
        updates, state = update(on_device(grads), state, params)
        params = jax.tree.map(jnp.add, params, updates)
        path.append(params)
    return path


@every_optimizer
@every_sphere
def test_equals_a_loop_over_matrices(name, sphere):
    ours, oracle = OPTIMIZERS[name]
    gradients = [random(SHAPES, step) for step in range(1, 6)]
    start = random(SHAPES, 0)
    path = train(ours(0.1, sphere=sphere, weight_decay=0.5), start, gradients)
    for leaf in SHAPES:
        given = [grads[leaf] for grads in gradients]
        wanted = oracle(start[leaf], given, rate=0.1, decay=0.5, sphere=sphere)
        assert_close([params[leaf] for params in path], wanted, "matmul")


@every_optimizer
def test_the_norm_is_kept_over_a_thousand_steps(name):
    optimizer = OPTIMIZERS[name][0](lambda count: 0.05 / jnp.sqrt(1.0 + count))
    start = {"w": random({"w": (2, 3, 8, 6)}, 0)["w"] * np.float32(0.02)}
    params = on_device(start)

    @jax.jit
    def steps(params, state):
        def step(carry, key):
            params, state = carry
            grads = jax.tree.map(lambda p: jax.random.normal(key, p.shape) + 3.0 * p, params)
            updates, state = optimizer.update(grads, state, params)
            params = jax.tree.map(jnp.add, params, updates)
            squares = jnp.sum(params["w"] ** 2, axis=(-2, -1))
            return (params, state), squares

        return jax.lax.scan(step, (params, state), jax.random.split(jax.random.key(0), 1000))

    (params, _), squares = steps(params, optimizer.init(params))
    kept = np.sqrt(np.asarray(squares)) / norms(start["w"])
    np.testing.assert_allclose(kept, 1.0, rtol=0.0, atol=1e-6)  # the promised bound
    np.testing.assert_allclose(norms(params["w"]), norms(start["w"]), rtol=1e-6)
    cosine = np.sum(np.asarray(params["w"]) * start["w"], axis=(-2, -1)) / norms(start["w"]) ** 2
    assert cosine.max() < 0.95  # and the matrix moved


@every_optimizer
@pytest.mark.parametrize("rate", [0.014, 0.3])
def test_a_step_is_the_learning_rate(name, rate):
    """Before the projection lr of the norm; after it the angle atan(lr) for a direction at right
    angles, and atan(lr sqrt(1 - c^2) / (1 - lr c)) for one at the cosine c."""
    start = random({"w": (4, 6, 8)}, 0)
    gradient = random({"w": (4, 6, 8)}, 1)
    w = start["w"].astype(np.float64)
    [after] = train(OPTIMIZERS[name][0](rate), start, [gradient])
    step = next(DIRECTIONS[name]([gradient["w"].astype(np.float64)]))
    u = step * (norms(w) / norms(step))[:, None, None]
    moved = w - rate * u
    np.testing.assert_allclose(norms(moved - w) / norms(w), rate, rtol=1e-12)
    wanted = moved * (norms(w) / norms(moved))[:, None, None]
    assert_close(after["w"], wanted, "matmul")
    c = np.sum(u * w, axis=(-2, -1)) / norms(w) ** 2
    cosine = np.sum(np.asarray(after["w"]) * w, axis=(-2, -1)) / norms(w) ** 2
    angle = np.arctan(rate * np.sqrt(1 - c**2) / (1 - rate * c))
    # The arc cosine of float32 weights near 1 loses digits as 1e-7 / angle.
    np.testing.assert_allclose(np.arccos(cosine), angle, atol=2e-7 / rate, rtol=1e-6)


def test_an_orthogonal_step_turns_by_the_arc_tangent_of_the_rate():
    start = {"w": np.diag([3.0, 4.0]).astype(np.float32)}
    direction = {"w": np.array([[0.0, 2.0], [7.0, 0.0]], np.float32)}
    [after] = train(on_sphere(0.5, name="test"), start, [direction])
    cosine = np.sum(np.asarray(after["w"]) * start["w"]) / 25.0
    assert math.acos(cosine) == pytest.approx(math.atan(0.5), rel=1e-6)


@every_optimizer
def test_weight_decay_on_a_sphere_is_of_second_order(name):
    """The shift at decay 0.1 is about 0.1 eta^2 of the norm (HyperP's theorem 1), at right angles
    to the matrix: it falls with the square of the rate."""
    start, gradients = random({"w": (16, 24)}, 0), [random({"w": (16, 24)}, 1)]
    shifts = []
    for rate in (0.1, 0.01):
        [plain] = train(OPTIMIZERS[name][0](rate), start, gradients)
        [decayed] = train(OPTIMIZERS[name][0](rate, weight_decay=0.1), start, gradients)
        shifts.append(norms(decayed["w"] - plain["w"]) / norms(start["w"]) / rate**2)
    np.testing.assert_allclose(shifts, 0.1, rtol=0.05)


def test_decay_does_not_shrink_the_radius():
    """HyperP's code takes the norm after the decay: 0.98019 after 20 steps."""
    start = random({"w": (6, 8)}, 0)
    path = train(muonh(0.01, weight_decay=0.1), start, [random({"w": (6, 8)}, 1)] * 20)
    np.testing.assert_allclose(norms(path[-1]["w"]), norms(start["w"]), rtol=1e-6)


@every_optimizer
def test_an_expert_without_a_gradient_stays_bitwise(name):
    start, gradient = random({"w": (2, 3, 4, 6)}, 0), random({"w": (2, 3, 4, 6)}, 1)
    gradient["w"][1, 2] = 0.0
    path = train(OPTIMIZERS[name][0](0.1, weight_decay=0.3), start, [gradient] * 3)
    after = np.asarray(path[-1]["w"])
    assert np.array_equal(after[1, 2], start["w"][1, 2])
    assert np.isfinite(after).all()
    still = (after == start["w"]).all(axis=(-2, -1))
    assert still.sum() == 1


def test_experts_share_a_sphere_only_in_a_stack():
    """One expert is pushed outward: it grows at the others' cost where they share one."""
    start = random({"w": (1, 4, 8, 6)}, 0)
    ratios = {}
    for sphere in ("matrix", "stack"):
        params = on_device(start)
        optimizer = muonh(0.05, matrix_axes=(-2, -1), sphere=sphere)
        state, update = optimizer.init(params), jax.jit(optimizer.update)
        for step in range(40):
            noise = random({"w": (1, 4, 8, 6)}, step + 1)["w"]
            noise[0, 0] = -np.asarray(params["w"][0, 0])
            updates, state = update(on_device({"w": noise}), state, params)
            params = jax.tree.map(jnp.add, params, updates)
        ratios[sphere] = (norms(params["w"]) / norms(start["w"]))[0]
        total = np.linalg.norm(np.asarray(params["w"], np.float64))
        assert total == pytest.approx(np.linalg.norm(start["w"].astype(np.float64)), rel=1e-6)
    np.testing.assert_allclose(ratios["matrix"], 1.0, rtol=1e-6)
    assert ratios["stack"][0] > 1.1 and ratios["stack"][1:].max() < 1.0


@every_optimizer
def test_a_zero_matrix_is_refused_by_name(name):
    params = on_device(random({"embedding": (4, 6), "experts": (2, 3, 4, 6)}, 0))
    params["experts"] = params["experts"].at[1, 0].set(0.0)
    with pytest.raises(ValueError) as error:
        OPTIMIZERS[name][0](0.1).init({"blocks": params})
    assert str(error.value) == (
        "blocks/experts holds a matrix of zeros (the first at [1, 0, 0, 0] of [2, 3, 1, 1]), and"
        f" {name} keeps the norm that a matrix begins with, so it would stay zero: initialise it,"
        " or give it to adamw"
    )


@every_optimizer
def test_a_zero_matrix_stays_finite_if_init_is_traced(name):
    """A traced `init` cannot check values: the matrix does not move, and the others do."""
    params = on_device(random({"w": (3, 4, 6)}, 0))
    params["w"] = params["w"].at[1].set(0.0)
    optimizer = OPTIMIZERS[name][0](0.1)
    state, update = jax.jit(optimizer.init)(params), jax.jit(optimizer.update)
    for step in (1, 2):
        updates, state = update(on_device(random({"w": (3, 4, 6)}, step)), state, params)
        params = jax.tree.map(jnp.add, params, updates)
    after = np.asarray(params["w"])
    assert np.isfinite(after).all() and not after[1].any()
    radius = np.asarray(optax.tree.get(state, "radius")["w"]).ravel()
    np.testing.assert_allclose(norms(after), radius, rtol=1e-6)
    assert radius[1] == 0.0 and (radius[[0, 2]] > 0.0).all()


@every_optimizer
def test_bfloat16_parameters_stay_near_their_sphere(name):
    """The radius is stored, so their rounding does not add up."""
    params = {"w": jnp.asarray(random({"w": (16, 24)}, 0)["w"], jnp.bfloat16)}
    optimizer = OPTIMIZERS[name][0](0.05)
    start, state, update = norms(params["w"]), optimizer.init(params), jax.jit(optimizer.update)
    for step in range(30):
        grads = {"w": jnp.asarray(random({"w": (16, 24)}, step + 1)["w"], jnp.bfloat16)}
        updates, state = update(grads, state, params)
        assert updates["w"].dtype == jnp.float32
        params = {"w": params["w"] + updates["w"].astype(jnp.bfloat16)}
    # 2^-9 per weight, at random over 384 of them.
    np.testing.assert_allclose(norms(params["w"]), start, rtol=2e-3)


@every_optimizer
def test_the_radius_is_restored_from_a_checkpoint(name, tmp_path):
    """The radius is the initial one, although the saved weights are off the sphere."""
    start = on_device(random(SHAPES, 0))
    optimizer = OPTIMIZERS[name][0](0.1)
    state = optimizer.init(start)
    moved = jax.tree.map(lambda w: 3.0 * w, start)
    save_checkpoint(tmp_path, {"opt_state": state, "params": moved}, step=1, config={})
    target = {"opt_state": optimizer.init(moved), "params": moved}
    restored = load_checkpoint(tmp_path, target=target)
    assert_close(restored["opt_state"], state, "elementwise")
    updates, _ = optimizer.update(
        on_device(random(SHAPES, 1)), restored["opt_state"], restored["params"]
    )
    landed = jax.tree.map(jnp.add, moved, updates)
    for leaf in SHAPES:
        np.testing.assert_allclose(norms(landed[leaf]), norms(start[leaf]), rtol=1e-6)


def test_a_vector_is_refused_by_name():
    with pytest.raises(ValueError, match=r"^adamh moves matrices, and gain of shape \(6,\) is"):
        on_sphere(0.1, name="adamh").init({"gain": jnp.ones(6)})


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match=r"^beta2=1.0 must lie in \[0, 1\)$"):
        adamh(0.1, beta2=1.0)
    with pytest.raises(ValueError, match=r"^weight_decay=-1.0 must be 0 or more, and finite$"):
        muonh(0.1, weight_decay=-1.0)
    with pytest.raises(ValueError, match=r"^sphere='layer' must be matrix or stack$"):
        inspect.unwrap(on_sphere)(0.1, sphere="layer", name="muonh")
    params = {"w": jnp.ones((2, 3))}
    optimizer = muonh(0.1)
    text = r"^muonh moves matrices on spheres: call update\(grads, state, params\)$"
    with pytest.raises(ValueError, match=text):
        optimizer.update(params, optimizer.init(params))


def test_groups_share_one_tree_by_partition():
    params = on_device({**random({"hidden": (2, 4, 6), "head": (6, 9)}, 0), "gain": np.ones(6)})
    labels = {"hidden": "muonh", "head": "adamh", "gain": "sgd"}
    groups = {
        "muonh": muonh(0.1, matrix_axes=(-2, -1)),
        "adamh": adamh(0.1),
        "sgd": optax.sgd(0.1),
    }
    optimizer = optax.partition(groups, labels)
    updates, _ = jax.jit(optimizer.update)(params, optimizer.init(params), params)
    for name in ("hidden", "head"):
        after = params[name] + updates[name]
        np.testing.assert_allclose(norms(after), norms(params[name]), rtol=1e-6)
        assert np.abs(np.asarray(updates[name])).max() > 1e-3
