# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""A cache in 8 and 4 bits: what it holds, what attention sees of it, and what it takes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.cache import initial_cache
from jaxmoe.models.config import AttentionConfig, ModelConfig, MoEConfig
from jaxmoe.models.decode import generate
from jaxmoe.models.quantize import stored_bytes
from jaxmoe.models.transformer import Transformer
from jaxmoe.precision import PrecisionPolicy
from jaxmoe.scaling.initialize import parameter_table
from pallas_kernels import QuantizedArray
from sharding import MeshConfig, make_mesh
from sharding.sequence_parallel import AllGatherKVConfig, as_cached, bytes_per_token
from tests.support.tolerances import assert_close

BATCH, PROMPT, NEW = 4, 5, 6
# Every expert computes for every token: no token changes its experts by a hair.
MODEL = ModelConfig(
    vocab_size=24,
    num_layers=2,
    embed_dim=16,
    attention=AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8, window=6),
    moe=MoEConfig(num_experts=2, top_k=2, expert_dim=8),
)
INT4, INT8 = (ExecutionConfig(precision=PrecisionPolicy(cache=form)) for form in ("int4", "int8"))


@pytest.fixture(scope="module")
def params():
    rng = np.random.default_rng(0)

    def value(row):
        drawn = 2.0 * rng.standard_normal(row.shape) / row.declaration.fan(0) ** 0.5
        return jnp.asarray(drawn, jnp.float32)

    return parameter_table(MODEL).tree(value)


@pytest.fixture(scope="module")
def tokens():
    rng = np.random.default_rng(1)
    return jnp.asarray(rng.integers(0, MODEL.vocab_size, (BATCH, PROMPT + NEW)), jnp.int32)


def whole(execution, params, tokens):
    """The logits of one forward pass over all tokens."""
    return jax.jit(
        lambda params, tokens: (
            Transformer(MODEL, execution).apply({"params": params}, tokens).logits
        )
    )(params, tokens)


def step_by_step(execution, params, tokens):
    """The same through a cache: the prompt at once, then one token after the other."""

    @jax.jit
    def run(params, tokens):
        cache = initial_cache(MODEL, execution, batch=BATCH, length=PROMPT + NEW)

        def decode(carry, new):
            first, cache = carry
            places = first + jnp.arange(new.shape[1], dtype=jnp.int32)[None, :]
            output = Transformer(MODEL, execution).apply(
                {"params": params},
                new,
                positions=jnp.broadcast_to(places, new.shape),
                cache=cache,
            )
            return (first + new.shape[1], output.cache), output.logits

        carry, first = decode((jnp.int32(0), cache), tokens[:, :PROMPT])
        (_, cache), rest = jax.lax.scan(
            lambda carry, new: decode(carry, new[:, None]), carry, tokens[:, PROMPT:].T
        )
        return jnp.concatenate([first, rest[:, :, 0].swapaxes(0, 1)], axis=1), cache

    return run(params, tokens)


def test_each_token_and_head_has_its_scale():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((2, 3, 2, 96)), jnp.float32).at[:, 1].multiply(100.0)
    for form, steps in (("int8", 127), ("int4", 7)):
        # 48 is the largest divisor of 96 that is at most 64.
        groups = np.asarray(x, np.float64).reshape(2, 3, 2, 2, 48)
        scale = np.abs(groups).max(axis=-1, keepdims=True) / steps
        wanted = (np.round(groups / scale) * scale).reshape(x.shape)
        assert_close(as_cached(x, form), wanted, kind="elementwise")
    assert as_cached(x, "compute") is x


def test_decoding_equals_one_pass_over_rounded_keys_and_values(params, tokens):
    """`evaluate` relies on it."""
    through_cache, cache = step_by_step(INT4, params, tokens)
    for part in cache.values():
        assert isinstance(part.k, QuantizedArray) and part.k.values.dtype == jnp.int4
    assert_close(through_cache, whole(INT4, params, tokens), kind="end_to_end")


@pytest.mark.slow
def test_rounding_error_is_nonzero_and_small(params, tokens):
    full = whole(ExecutionConfig(), params, tokens)

    def error(execution):
        logits = whole(execution, params, tokens)
        return float(jnp.sqrt(jnp.mean((logits - full) ** 2) / jnp.mean(full**2)))

    # One rounding of keys and values is 0.12 of them in 4 bits, 0.007 in 8 (steps of 1/7, 1/127 of
    # the largest of 8), and attention averages.
    assert 0.01 < error(INT4) < 0.3
    assert 0.0 < error(INT8) < 0.02


def test_bytes_of_a_token_are_those_of_the_cache():
    attention = MODEL.attention
    for form, of_one_head in (("compute", 8 * 4), ("int8", 8 + 4), ("int4", 4 + 4)):
        execution = ExecutionConfig(precision=PrecisionPolicy(cache=form))
        cache = initial_cache(MODEL, execution, batch=3, length=10)
        taken = bytes_per_token(
            num_layers=MODEL.num_layers,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            form=form,
            dtype=jnp.float32,
        )
        assert taken == 2 * 2 * 2 * of_one_head
        assert stored_bytes([(part.k, part.v) for part in cache.values()]) == 3 * 10 * taken


MESHES = {"data2_seq2": MeshConfig(data=2, seq=2), "seq2_tensor2": MeshConfig(seq=2, tensor=2)}


@pytest.mark.slow
@pytest.mark.parametrize("name", MESHES)
def test_a_spread_cache_gives_the_same_tokens(params, tokens, name):
    def greedy(params, execution):
        return generate(
            MODEL,
            params,
            tokens[:, :PROMPT],
            num_tokens=NEW,
            key=jax.random.key(0),
            temperature=0.0,
            execution=execution,
        )

    config = MESHES[name]
    mesh = make_mesh(config, jax.devices()[:4])
    execution = dataclasses.replace(INT4, mesh=config, sequence_parallel=AllGatherKVConfig())
    table = parameter_table(MODEL, rules=execution.axis_rules)
    spread = jax.device_put(params, table.tree(lambda row: NamedSharding(mesh, row.spec)))
    with jax.set_mesh(mesh):
        found = greedy(spread, execution)
    np.testing.assert_array_equal(found, greedy(params, INT4))
