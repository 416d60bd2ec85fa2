# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Layers in 2, 3 or 4 bits: what a step trains, how bits are drawn, and a search by hand."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util

from jaxmoe.adapters import QuantisedChoicesConfig, TargetsConfig, fold_adapters
from jaxmoe.contrib.adapters.quantised_choices import draw_bits
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.transformer import forward
from jaxmoe.scaling.initialize import init_params, parameter_table
from tests.support.models import FULL

CHOICES = QuantisedChoicesConfig(
    rank=2, targets=TargetsConfig(roles=("attention_in", "expert_out", "mlp_out")), mean_bits=3.0
)
MODEL = dataclasses.replace(FULL, adapter=CHOICES)
LAYERS = MODEL.layer_numbers
IDS = jax.random.randint(jax.random.key(2), (2, 6), 0, FULL.vocab_size)


def flat(tree):
    return traverse_util.flatten_dict(tree, sep="/")


def drawn_params():
    """Parameters with additions that are not zero."""
    params = flat(init_params(MODEL, jax.random.key(0)))
    for number, path in enumerate(path for path in params if path.endswith(":ups")):
        key = jax.random.fold_in(jax.random.key(1), number)
        params[path] = 0.3 * jax.random.normal(key, params[path].shape)
    return traverse_util.unflatten_dict(params, sep="/")


def within(params, bits):
    """Parameters with the bits of least error, of a mean of some bits."""
    adapter = dataclasses.replace(CHOICES, mean_bits=bits)
    return adapter.begin(params, LAYERS, jax.random.key(0))


def bits_of(params):
    """Bits of each layer, the same for all its matrices."""
    found = {}
    for path, bits in flat(params).items():
        if path.endswith(":bits"):
            own = next(own for stack, own in LAYERS if path.startswith(f"{stack}/"))
            for layer, one in zip(own, bits.tolist(), strict=True):
                assert found.setdefault(layer, one) == one, path
    return [found[layer] for layer in sorted(found)]


@pytest.mark.slow
def test_a_step_trains_the_factors_of_the_drawn_bits_alone():
    params, table = drawn_params(), parameter_table(MODEL)
    given = {"train": True, "key": jax.random.key(3)}

    def loss(trained):
        whole = table.merge(trained, params)
        return jnp.mean(forward(MODEL, ExecutionConfig(), whole, IDS, **given).logits ** 2)

    grads = flat(jax.jit(jax.grad(loss))(table.select_trained(params)))
    drawn = flat(CHOICES.prepare(params, LAYERS, given["key"]))
    assert len(set(bits_of(traverse_util.unflatten_dict(drawn, sep="/")))) > 1
    for path in [path for path in grads if path.endswith((":downs", ":ups"))]:
        bits = drawn[f"{path.rpartition(':')[0]}:bits"]
        size = np.abs(np.asarray(grads[path])).reshape(len(bits), 3, -1).max(axis=-1)
        assert ((size > 0) == (np.arange(2, 5)[None, :] == np.asarray(bits)[:, None])).all(), path


def test_the_mean_of_the_bits_is_uniform():
    """Bits drawn for each layer by itself would have nearly all means in the middle."""
    keys, layers = jax.random.split(jax.random.key(0), 4000), 8
    bits = np.asarray(jax.jit(jax.vmap(lambda key: draw_bits(key, layers)))(keys))
    assert set(np.unique(bits)) == {2, 3, 4}
    counts = np.bincount(bits.sum(axis=1) - 2 * layers, minlength=17)
    mean = len(keys) / 17
    assert (np.abs(counts - mean) < 5 * np.sqrt(mean)).all()
    np.testing.assert_allclose(bits.mean(axis=0), 3.0, atol=0.07)
    alone = np.random.default_rng(0).integers(2, 5, (len(keys), layers)).sum(axis=1) - 2 * layers
    assert np.bincount(alone, minlength=17)[8] > 2 * mean > 20 * np.bincount(alone)[1]


@pytest.mark.parametrize("budget", [2.0, 3.4])
def test_a_member_equals_its_folded_weights(budget):
    params = within(drawn_params(), budget)
    assert sum(bits_of(params)) == {2.0: 6, 3.4: 10}[budget]
    plain = jax.jit(lambda params: fold_adapters(params, CHOICES, LAYERS))(params)
    found = jax.jit(lambda p: forward(MODEL, ExecutionConfig(), p, IDS).logits)(params)
    wanted = jax.jit(lambda p: forward(FULL, ExecutionConfig(), p, IDS).logits)(plain)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_searched_bits_have_the_least_error_of_all():
    params = init_params(MODEL, jax.random.key(0))
    held, errors = flat(params), np.zeros((3, 5))
    fold = jax.jit(lambda params: fold_adapters(params, CHOICES, LAYERS))
    for bits in (2, 3, 4):
        rounded = flat(fold(within(params, bits)))
        for path, value in rounded.items():
            stack = [own for stack, own in LAYERS if path.startswith(f"{stack}/")]
            for place, layer in enumerate(stack[0] if stack else ()):
                errors[layer, bits] += np.sum((value[place] - held[path][place]) ** 2)
    totals = {
        bits: errors[np.arange(3), bits].sum()
        for bits in itertools.product((2, 3, 4), repeat=3)
        if sum(bits) == 8
    }
    found = tuple(bits_of(within(params, 2.7)))
    assert totals[found] <= min(totals.values()) * (1 + 1e-5)


def test_roles_outside_layers_and_bits_out_of_range_are_refused():
    with pytest.raises(ValueError, match="embedding/weight, and the parameters of layers alone"):
        adapter = dataclasses.replace(CHOICES, targets=TargetsConfig(roles=("embedding",)))
        parameter_table(dataclasses.replace(FULL, adapter=adapter))
    with pytest.raises(ValueError, match=r"adapter.mean_bits=5 must be from 2 to 4"):
        QuantisedChoicesConfig(mean_bits=5)
