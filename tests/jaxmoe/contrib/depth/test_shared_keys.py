# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Shared keys and values: all leaders is plain attention, the cache of leaders, and refusals."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.mixers import AttentionConfig, SharedKeysConfig
from jaxmoe.models.cache import initial_cache
from jaxmoe.models.config import DenseConfig, LayerConfig, ModelConfig, MoEConfig
from jaxmoe.models.transformer import forward
from jaxmoe.precision import PrecisionPolicy
from jaxmoe.scaling.initialize import parameter_table
from jaxmoe.training.pipeline.stages import check_pipeline
from sharding import MeshConfig
from tests.jaxmoe.layers.test_mesh_invariance import on_mesh, on_one_device
from tests.support.tolerances import assert_close

BATCH, LENGTH, VOCAB = 8, 8, 24
HEADS: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 4}
SHARED = SharedKeysConfig(**HEADS, leader_every=2, own_probability=0.5)
MODEL = ModelConfig(
    vocab_size=VOCAB,
    num_layers=5,
    embed_dim=16,
    attention=SHARED,
    moe=MoEConfig(num_experts=4, top_k=2, expert_dim=8),
)
"""Layers 0, 2 and 4 lead."""


@functools.cache
def params_of(model=MODEL):
    rng = np.random.default_rng(0)

    def value(row):
        scale = row.declaration.fan(0) ** -0.5
        return jnp.asarray(2.0 * scale * rng.standard_normal(row.shape), jnp.float32)

    return parameter_table(model).tree(value)


def tokens_of(seed=1):
    drawn = np.random.default_rng(seed).integers(0, VOCAB, (BATCH, LENGTH))
    return jnp.asarray(drawn, jnp.int32)


def with_attention(attention, model=MODEL):
    return dataclasses.replace(model, attention=attention)


@functools.cache
def value_and_gradient(model, *, train):
    def number(params, tokens, key):
        output = forward(model, ExecutionConfig(), params, tokens, train=train, key=key)
        return jnp.sum(jnp.sin(output.logits)), output.logits

    return jax.jit(jax.value_and_grad(number, has_aux=True))


@pytest.mark.parametrize("train", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_all_leaders_are_plain_attention_bit_for_bit(train):
    """Gradients to rounding: the compiler adds them up in another order."""
    given: Any = (params_of(), tokens_of(), jax.random.key(3))
    everyone = dataclasses.replace(SHARED, leader_every=1, own_probability=1.0)
    found = value_and_gradient(with_attention(everyone), train=train)(*given)
    plain = value_and_gradient(with_attention(AttentionConfig(**HEADS)), train=train)(*given)
    jax.tree.map(np.testing.assert_array_equal, found[0], plain[0])
    assert_close(found[1], plain[1], "end_to_end")
    shared = value_and_gradient(MODEL, train=train)(*given)
    assert float(jnp.abs(shared[0][1] - plain[0][1]).max()) > 1e-3


def test_layers_that_do_not_lead_have_no_gradient_of_their_keys():
    _, gradient = value_and_gradient(MODEL, train=False)(params_of(), tokens_of(), None)
    attention = gradient["moe_blocks_0"]["attention"]
    for name in ("k", "v"):
        moved = jnp.abs(attention[name]).max(axis=(1, 2, 3)) > 0
        assert moved.tolist() == [True, False, True, False, True]
    assert (jnp.abs(attention["q"]).max(axis=(1, 2, 3)) > 0).all()


def test_training_draws_leaders_with_their_probability():
    """The gradient of the keys shows which layers lead; the first of the stack always does."""
    run = value_and_gradient(MODEL, train=True)
    led = np.zeros(MODEL.num_layers)
    steps = 40
    for step in range(steps):
        _, gradient = run(params_of(), tokens_of(), jax.random.key(step))
        keys = gradient["moe_blocks_0"]["attention"]["k"]
        led += np.asarray(jnp.abs(keys).max(axis=(1, 2, 3)) > 0)
    assert led[0] == steps
    share = led[1:].sum() / (4 * steps)
    assert abs(share - SHARED.own_probability) < 5 * 0.5 / np.sqrt(4 * steps)
    assert (led[1:] > 0).all() and (led[1:] < steps).all()


def test_the_cache_holds_leaders_only():
    model, plain = MODEL, with_attention(AttentionConfig(**HEADS))
    sizes = []
    for one in (model, plain):
        cache = initial_cache(one, ExecutionConfig(), batch=BATCH, length=LENGTH)
        sizes.append(sum(leaf.nbytes for leaf in jax.tree.leaves(cache)))
    assert sizes[0] * MODEL.num_layers == sizes[1] * 3
    precision = PrecisionPolicy()
    counted = [
        one.attention.cache_bytes_per_token(precision, layers=MODEL.num_layers)
        for one in (model, plain)
    ]
    assert counted[0] * MODEL.num_layers == counted[1] * 3


def test_decoding_step_by_step_equals_the_whole():
    """Pieces of 6, 1 and 1 tokens."""
    execution, tokens = ExecutionConfig(), tokens_of()
    whole = value_and_gradient(MODEL, train=False)(params_of(), tokens, None)[0][1]

    @jax.jit
    def step(params, tokens, positions, cache):
        output = forward(MODEL, execution, params, tokens, positions=positions, cache=cache)
        return output.logits, output.cache

    cache, found, first = initial_cache(MODEL, execution, batch=BATCH, length=LENGTH), [], 0
    for count in (6, 1, 1):
        positions = jnp.broadcast_to(first + jnp.arange(count, dtype=jnp.int32), (BATCH, count))
        logits, cache = step(params_of(), tokens[:, first : first + count], positions, cache)
        found.append(logits)
        first += count
    assert_close(jnp.concatenate(found, axis=1), whole, "end_to_end")


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "rules"), [("data4_tensor2", "fully_sharded")])
def test_shared_keys_are_the_same_on_every_mesh(mesh, rules):
    model = dataclasses.replace(MODEL, num_layers=2)
    assert_close(on_mesh(model, mesh, rules), on_one_device(model), "end_to_end")


def test_what_cannot_carry_keys_is_refused():
    other = dataclasses.replace(SHARED, num_kv_heads=4)
    with pytest.raises(ValueError, match="2 mixers shared_keys that differ"):
        dataclasses.replace(MODEL, layers=(LayerConfig(), LayerConfig(mixer=other)))
    thin = MoEConfig(num_experts=4, top_k=2, expert_dim=8)
    with pytest.raises(ValueError, match="repeats a period with several layers of shared_keys"):
        ModelConfig(
            num_layers=4,
            attention=SHARED,
            moe=thin,
            layers=(LayerConfig(), LayerConfig(feed_forward=DenseConfig())),
        )
    staged = ExecutionConfig(mesh=MeshConfig(stage=5))
    with pytest.raises(ValueError, match="shared_keys take .* execution.mesh.stage=5 would pass"):
        check_pipeline(MODEL, staged, accumulation=5)
    with pytest.raises(ValueError, match="execution.halves=2 splits .*shared_keys"):
        forward(MODEL, ExecutionConfig(halves=2), params_of(), tokens_of())
    with pytest.raises(ValueError, match=r"own_probability=1.5 must be between 0 and 1"):
        dataclasses.replace(SHARED, own_probability=1.5)
    with pytest.raises(ValueError, match="own_probability draws .* no key was given"):
        forward(MODEL, ExecutionConfig(), params_of(), tokens_of(), train=True)
