# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Decoding with a cache against the whole forward pass, and sampling against its probabilities."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jaxmoe.execution import ExecutionConfig, WholeRowsConfig
from jaxmoe.models.cache import initial_cache
from jaxmoe.models.config import AttentionConfig, LatentAttentionConfig, ModelConfig, MoEConfig
from jaxmoe.models.decode import generate
from jaxmoe.models.transformer import Transformer
from jaxmoe.scaling.initialize import init_params, parameter_table
from sharding import MeshConfig, make_mesh
from sharding.sequence_parallel import AllGatherKVConfig
from tests.support.tolerances import assert_close

BATCH, PROMPT, NEW, VOCAB = 4, 5, 7, 24

# A dense layer, shared experts, grouped heads, and a window shorter than what is generated.
MODEL = ModelConfig(
    vocab_size=VOCAB,
    num_layers=2,
    embed_dim=16,
    attention=AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=4, window=4, is_gated=True),
    moe=MoEConfig(num_experts=4, top_k=2, expert_dim=8, num_shared_experts=1),
    dense_layers=(0,),
    dense_dim=16,
)


@pytest.fixture(scope="module")
def params():
    """Larger than initial values: with those, one token would win everywhere."""
    rng = np.random.default_rng(0)

    def value(row):
        return jnp.asarray(2.0 * rng.standard_normal(row.shape) / row.declaration.fan(0) ** 0.5)

    return jax.tree.map(lambda w: w.astype(jnp.float32), parameter_table(MODEL).tree(value))


@pytest.fixture(scope="module")
def prompt():
    rng = np.random.default_rng(1)
    return jnp.asarray(rng.integers(0, VOCAB, (BATCH, PROMPT)), jnp.int32)


@pytest.fixture(scope="module")
def whole():
    """(params, tokens [B PROMPT+NEW]) -> logits."""
    return jax.jit(
        lambda params, tokens: Transformer(MODEL).apply({"params": params}, tokens).logits
    )


@pytest.fixture(scope="module")
def greedy(params, prompt):
    key = jax.random.key(0)
    return generate(MODEL, params, prompt, num_tokens=NEW, key=key, temperature=0.0)


def test_greedy_equals_the_whole_forward(params, prompt, whole, greedy):
    assert greedy.shape == (BATCH, NEW) and greedy.dtype == jnp.int32
    logits = whole(params, jnp.concatenate([prompt, greedy], axis=1))
    np.testing.assert_array_equal(jnp.argmax(logits[:, PROMPT - 1 : -1], axis=-1), greedy)
    assert len(np.unique(greedy)) > 2, "one token for ever would prove little"


def test_cached_logits_equal_the_whole_forward(params, prompt, whole, greedy):
    """One token after the other from an empty cache, past the window."""
    execution = ExecutionConfig()
    tokens = jnp.concatenate([prompt, greedy], axis=1)

    @jax.jit
    def one(tokens, position, cache):
        positions = jnp.broadcast_to(position, (BATCH, 1))
        output = Transformer(MODEL, execution).apply(
            {"params": params}, tokens, positions=positions, cache=cache
        )
        return output.logits[:, 0], output.cache

    cache, logits = initial_cache(MODEL, execution, batch=BATCH, length=PROMPT + NEW), []
    for position in range(PROMPT + NEW):
        now = tokens[:, position : position + 1]
        step, cache = one(now, jnp.full((1, 1), position, jnp.int32), cache)
        logits.append(step)
    assert_close(jnp.stack(logits, axis=1), whole(params, tokens), kind="end_to_end")


def test_temperature_divides_the_logits(params, prompt, whole):
    """The first sampled token of many equal prompts has the frequencies of softmax(logits / t)."""
    rows = 4000
    tokens = jnp.pad(prompt[:1], ((0, 0), (0, NEW)))
    logits = np.asarray(whole(params, jnp.tile(tokens, (BATCH, 1)))[0, PROMPT - 1], np.float64)
    many = jnp.tile(prompt[:1], (rows, 1))

    def sample(temperature: float, seed: int = 0):
        key = jax.random.key(seed)
        return np.asarray(
            generate(MODEL, params, many, num_tokens=2, key=key, temperature=temperature)
        )

    for temperature in (0.5, 2.0):
        wanted = np.exp(logits / temperature - np.logaddexp.reduce(logits / temperature))
        sampled = np.bincount(sample(temperature)[:, 0], minlength=VOCAB) / rows
        variance = np.maximum(wanted * (1 - wanted), 1 / rows)
        deviations = (sampled - wanted) / np.sqrt(variance / rows)
        assert np.abs(deviations).max() < 5, deviations
    assert (sample(1e-4)[:, 0] == logits.argmax()).all()
    first, second = sample(1e9).T  # uniform, and the second token knows nothing of the first
    assert abs((first == second).mean() - 1 / VOCAB) < 5 / np.sqrt(VOCAB * rows)
    np.testing.assert_array_equal(sample(1.0), sample(1.0))
    assert (sample(1.0) != sample(1.0, seed=1)).any()


def test_prompts_of_unequal_length_equal_each_alone(params, prompt, greedy):
    """Also past the window, in the cache of a row that is shorter than others."""
    key = jax.random.key(0)
    rows = [[*map(int, row[: 1 + number])] for number, row in enumerate(prompt)]
    given = {"num_tokens": NEW, "key": key, "temperature": 0.0}
    together = generate(MODEL, params, rows, **given)
    for row, tokens in zip(rows, together, strict=True):
        np.testing.assert_array_equal(generate(MODEL, params, [row], **given)[0], tokens)
    again = generate(MODEL, params, [*map(list, np.asarray(prompt))], **given)
    np.testing.assert_array_equal(again, greedy)


def test_end_of_text_fills_the_rest_of_a_row(params, prompt, greedy):
    key, end = jax.random.key(0), int(greedy[0, 2])
    given = {"num_tokens": NEW, "key": key, "temperature": 0.0, "eos_ids": (end, VOCAB - 1)}
    wanted = np.asarray(greedy).copy()
    for row in wanted:
        ends = np.flatnonzero(np.isin(row, given["eos_ids"]))
        row[ends[0] + 1 if len(ends) else NEW :] = end
    np.testing.assert_array_equal(generate(MODEL, params, prompt, **given), wanted)


def test_another_prompt_compiles_nothing(params):
    """Other lengths, numbers of tokens and values of the sampling, up to the next size."""
    compiled = []

    def listen(event: str, duration: float, **about) -> None:
        compiled.extend([event] * (event == "/jax/core/compile/backend_compile_duration"))

    def run(rows, num_tokens, **given):
        key = jax.random.key(len(rows[0]))
        generate(MODEL, params, rows, num_tokens=num_tokens, key=key, **given)

    run([[1, 2], [3]], 5, temperature=0.7, top_k=3)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        run([[4, 5, 6, 7, 8], [1] * 30], 32, temperature=0.9, top_p=0.9)
        run([[4], [1, 2, 3]], 1, min_p=0.1)
        run([[4, 5], [1, 2, 3]], 9, temperature=0.1, top_k=2, top_p=0.5, min_p=0.2)
        assert not compiled
        run([[1] * 33, [1]], 9, top_k=2)  # the next size: the test can fail
        assert compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_bad_requests_are_refused(params, prompt):
    key = jax.random.key(0)
    for text, changes in {
        "generation needs a prompt of at least one token: row 0 is empty": {
            "prompt": prompt[:, :0]
        },
        "num_tokens=0: generation needs a token to generate": {"num_tokens": 0},
        "prompt must be rows of token ids": {"prompt": prompt[0]},
        "prompt row 1 must be token ids from 0 to 23, and holds 0 to 24": {
            "prompt": [[1], [24, 0]]
        },
        "top_p=0.0 must be above 0": {"top_p": 0.0},
        "temperature=-0.5 must be 0 (greedy) or above": {"temperature": -0.5},
    }.items():
        arguments = {"prompt": prompt, "num_tokens": 2, "temperature": 1.0, "key": key} | changes
        with pytest.raises(ValueError) as error:
            generate(MODEL, params, **arguments)
        assert text in str(error.value)


MESHES = {
    "seq4": MeshConfig(seq=4),
    "seq2_tensor2": MeshConfig(seq=2, tensor=2),
    "data2_seq2": MeshConfig(data=2, seq=2),
}
IN_SHORT = "data2_seq2"
CASES = [pytest.param(name, marks=() if name == IN_SHORT else pytest.mark.slow) for name in MESHES]


def on_mesh(name, params):
    config = MESHES[name]
    mesh = make_mesh(config, jax.devices()[: math.prod(config.sizes)])
    execution = ExecutionConfig(mesh=config, sequence_parallel=AllGatherKVConfig())
    table = parameter_table(MODEL, rules=execution.axis_rules)
    spread = jax.device_put(params, table.tree(lambda row: NamedSharding(mesh, row.spec)))
    return mesh, execution, spread


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_spread_cache_gives_the_same_tokens(name, params, prompt, greedy):
    mesh, execution, spread = on_mesh(name, params)
    with jax.set_mesh(mesh):
        tokens = generate(
            MODEL,
            spread,
            prompt,
            num_tokens=NEW,
            key=jax.random.key(0),
            temperature=0.0,
            execution=execution,
        )
    np.testing.assert_array_equal(tokens, greedy)


@pytest.mark.slow
@pytest.mark.parametrize("name", MESHES)
def test_a_spread_cache_gives_the_same_logits(name, params, prompt):
    """After the prompt, and after a further token, which is on another device."""

    def both(execution):
        def run(params, prompt):
            length = PROMPT + 2  # divides by no mesh: the cache is longer then
            cache = initial_cache(MODEL, execution, batch=BATCH, length=length)
            found = []
            for tokens, first in ((prompt, 0), (prompt[:, :1], PROMPT)):
                places = first + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
                output = Transformer(MODEL, execution).apply(
                    {"params": params},
                    tokens,
                    positions=jnp.broadcast_to(places, tokens.shape),
                    cache=cache,
                )
                cache = output.cache
                found.append(output.logits)
            return found, cache

        return jax.jit(run)

    wanted, cache = both(ExecutionConfig())(params, prompt)
    mesh, execution, spread = on_mesh(name, params)
    with jax.set_mesh(mesh):
        logits, cut = both(WholeRowsConfig.of(execution))(spread, prompt)
    assert_close(logits, wanted, kind="end_to_end")
    for path, part in cut.items():
        assert part.k.sharding.spec[2] == "seq"
        held = jax.tree.map(lambda x: np.asarray(x)[:, :, : PROMPT + 2], (part.k, part.v))
        assert_close(held, (cache[path].k, cache[path].v), kind="end_to_end")


def temporaries_of_a_token(model, execution, mesh):
    """Temporaries of a step of one token, as a fraction of the cache's bytes of a device."""
    spread = jax.eval_shape(lambda: init_params(model, jax.random.key(0), mesh=mesh))
    cache = jax.eval_shape(lambda: initial_cache(model, execution, batch=2, length=4096))

    def step(params, tokens, positions, cache):
        given = {"positions": positions, "cache": cache}
        output = Transformer(model, execution).apply({"params": params}, tokens, **given)
        return output.logits, output.cache

    one = jax.ShapeDtypeStruct((2, 1), jnp.int32)
    memory = jax.jit(step, donate_argnums=3).lower(spread, one, one, cache).compile()
    held = 0
    for leaf in jax.tree.leaves(cache):
        shape = leaf.shape if mesh is None else leaf.sharding.shard_shape(leaf.shape)
        held += math.prod(shape) * leaf.dtype.itemsize
    return memory.memory_analysis().temp_size_in_bytes / held


@pytest.mark.parametrize("name", ["none", "seq2_tensor2"])
@pytest.mark.parametrize("mixer", ["attention", "latent"])
def test_a_token_writes_its_cache_in_place(name, mixer):
    """One layer's part of 24 is read beside the cache; a copied cache would be more than 1."""
    attention = LatentAttentionConfig(num_heads=2, latent_dim=24, nope_dim=8, rope_dim=8)
    if mixer == "attention":
        attention = AttentionConfig(num_heads=4, num_kv_heads=4, head_dim=32)
    model = dataclasses.replace(
        MODEL, attention=attention, num_layers=24, moe=None, dense_layers=()
    )
    if name == "none":
        assert temporaries_of_a_token(model, ExecutionConfig(), None) < 0.1
        return
    config = MESHES[name]
    execution = ExecutionConfig(mesh=config, sequence_parallel=AllGatherKVConfig())
    mesh = make_mesh(config, jax.devices()[: math.prod(config.sizes)])
    with jax.set_mesh(mesh):
        assert temporaries_of_a_token(model, WholeRowsConfig.of(execution), mesh) < 0.1


def test_prompts_that_do_not_divide_are_refused(params, prompt):
    mesh, execution, spread = on_mesh("data2_seq2", params)
    text = "prompt: the dimension 'act_batch' of size 3 must be divisible by mesh.data=2"
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=text):
        generate(
            MODEL,
            spread,
            prompt[:3],
            num_tokens=2,
            key=jax.random.key(0),
            execution=execution,
        )
