# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`fit` trains Llama, T5 and GPT-J trees on any mesh to the losses of one device."""

import doctest
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmoe.contrib.foreign_models.fit import fit
from tests.support.foreign_models import FOREIGN, VOCAB

STEPS = 3


def _examples() -> list[np.ndarray]:
    start = np.random.default_rng(0).integers(VOCAB, size=20)
    return [(s + np.arange(9)).astype(np.int32) % VOCAB for s in start]


def _train(name: str, key, **options):
    init, forward, _ = FOREIGN[name]

    def loss(params, tokens):
        logits = jax.nn.log_softmax(forward(params, tokens[:, :-1]))
        return -jnp.take_along_axis(logits, tokens[:, 1:, None], -1).mean()

    return fit(
        np.stack,
        loss,
        lambda params, tokens: forward(params, tokens[:, :-1]).argmax(-1),
        params=jax.jit(init)(key),
        optimizer=optax.adam(1e-2),
        train=_examples(),
        test=_examples()[:11],
        steps=STEPS,
        batch_size=8,
        **options,
    )


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) for n in FOREIGN])
def test_foreign_trees_train_to_the_loss_of_one_device(name, key):
    alone = _train(name, key, devices=jax.devices()[:1])
    shared = _train(name, key, tensor=4)
    assert len(alone.losses) == STEPS and alone.losses[-1] < alone.losses[0]
    np.testing.assert_allclose(shared.losses, alone.losses, rtol=1e-5)
    assert shared.predictions.shape == (11, 8)
    assert (shared.predictions == alone.predictions).mean() > 0.98
    for one, other in zip(*map(jax.tree.leaves, (alone.params, shared.params)), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), atol=1e-3)


def test_optimizer_state_has_the_layout_of_its_parameters():
    """As seen in the step: each device has a quarter of the columns of a matrix and its moments."""
    seen = {}

    def update(updates, state, params=None):
        jax.debug.inspect_array_sharding(
            state["w"], callback=lambda layout: seen.update(state=layout.spec)
        )
        return jax.tree.map(lambda g: -0.1 * g, updates), updates

    optimizer = optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params), update
    )
    result = fit(
        np.stack,
        lambda p, x: jnp.square(x @ p["w"]).mean(),
        lambda p, x: x,
        params={"w": jnp.ones((4, 8))},
        optimizer=optimizer,
        train=[np.ones(4, np.float32)],
        steps=1,
        batch_size=2,
        tensor=4,
    )
    assert seen["state"] == result.params["w"].sharding.spec == jax.P(None, "tensor")


def test_arrays_of_the_caller_are_not_donated():
    params = {"w": jnp.ones((4, 8))}
    for _ in range(2):
        result = fit(
            np.stack,
            lambda p, x: jnp.square(x @ p["w"]).mean(),
            lambda p, x: x,
            params=params,
            optimizer=optax.sgd(0.1),
            train=[np.ones(4, np.float32)],
            steps=2,
            batch_size=8,
        )
        assert result.predictions is None
    assert float(params["w"].sum()) == 32.0


def test_every_example_is_drawn_once_per_epoch():
    drawn = []
    fit(
        lambda rows: drawn.extend(rows) or np.zeros(8, np.float32),
        lambda p, x: p["w"] + x.mean(),
        lambda p, x: x,
        params={"w": jnp.array(0.0)},
        optimizer=optax.sgd(0.1),
        train=list(range(12)),
        steps=6,
        batch_size=8,
    )
    epochs = [drawn[i : i + 12] for i in range(0, 48, 12)]
    assert all(sorted(epoch) == list(range(12)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 4


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"batch_size": 6, "tensor": 2},
            "batch_size=6 must be a multiple of the 4 devices that share a batch (8 devices,"
            " tensor=2): choose a multiple of 4, or a larger tensor",
        ),
        ({"train": []}, "train has no example for 1 steps: pass some, or steps=0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(options, text):
    given = {"train": [1.0], "steps": 1, "batch_size": 8, "optimizer": optax.sgd(0.1), **options}
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        fit(np.stack, lambda p, x: x, lambda p, x: x, params={}, **given)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"params": {}},
            "predict reads 'w', which is missing: params has no arrays, the batch of collate has"
            " one array",
        ),
        (
            {"predict": lambda p, x: p["head"] * x},
            "predict reads 'head', which is missing: params has w, the batch of collate has one"
            " array",
        ),
        (
            {"loss": lambda p, x: p["w"] * x},
            "loss returns ShapeDtypeStruct(shape=(8,), dtype=float32), which must be a scalar: take"
            " the mean over the batch",
        ),
    ],
)
def test_missing_parameters_and_bad_losses_are_refused(changes, text):
    given = {
        "collate": lambda rows: np.asarray(rows, np.float32),
        "loss": lambda p, x: jnp.mean(p["w"] * x),
        "predict": lambda p, x: p["w"] * x,
        "params": {"w": jnp.array(1.0)},
        **changes,
    }
    options = {"train": [1.0] * 8, "test": [1.0], "steps": 1, "batch_size": 8}
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        fit(**given, optimizer=optax.sgd(0.1), **options)


def test_several_processes_are_refused(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match="^fit runs in one process, and there are 2: train with"):
        _train("gptj", jax.random.key(0))


def test_example_in_the_docstring():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        found = doctest.testmod(sys.modules["jaxmoe.contrib.foreign_models.fit"])
    assert found.attempted == 4 and found.failed == 0
