# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Models with these mixers beside attention: on meshes, and decoded."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jaxmoe.catalog import choice
from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.mixers import AttentionConfig
from jaxmoe.models.config import LayerConfig, ModelConfig, MoEConfig
from jaxmoe.models.decode import generate
from jaxmoe.models.transformer import Transformer
from jaxmoe.scaling.initialize import init_params, parameter_table
from sharding import MeshConfig, make_mesh
from sharding.axes import MESH_AXES
from sharding.distributed import global_batch
from sharding.sequence_parallel import AutoSequenceParallelConfig, RingConfig
from tests.support.tolerances import assert_close

BATCH, LENGTH, VOCAB = 4, 12, 32
MIXERS = {
    "short_convolution": choice("mixer", "short_convolution")(num_channels=16),
    "gated_delta": choice("mixer", "gated_delta")(
        num_heads=4, num_key_heads=2, head_dim=6, key_dim=5, chunk=4
    ),
    "kimi_delta": choice("mixer", "kimi_delta")(
        num_heads=4, num_key_heads=4, head_dim=6, key_dim=5, gate_rank=3, chunk=4
    ),
    "bounded_delta": choice("mixer", "kimi_delta")(
        num_heads=4,
        num_key_heads=4,
        head_dim=6,
        key_dim=5,
        gate_rank=None,
        decay_floor=-3.0,
        chunk=4,
    ),
    "lightning": choice("mixer", "lightning")(
        num_heads=4, head_dim=6, chunk=4, decay_layers=4, layer_step=2
    ),
    "rotary_lightning": choice("mixer", "rotary_lightning")(
        num_heads=4, head_dim=6, chunk=4, decay_layers=4, layer_step=2, norm_groups=2, rotary_dim=4
    ),
}


@functools.cache
def model_of(name):
    """Two repeats of a layer with a state and one that attends, with experts.

    The first output of a segment is a number times a vector, and its norm leaves little but the
    sign of the number. With the usual epsilon the last bits of the parameters move a gradient by
    up to 7e-5 of its largest value, and by 7e-7 with this one.
    """
    return ModelConfig(
        vocab_size=VOCAB,
        num_layers=4,
        embed_dim=16,
        attention=AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8),
        moe=MoEConfig(num_experts=4, top_k=2, expert_dim=12),
        layers=(LayerConfig(mixer=MIXERS[name]), LayerConfig()),
        norm_epsilon=0.1,
    )


@functools.cache
def params_of(name):
    params = init_params(model_of(name), jax.random.key(0))
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda x: x + 0.1 * rng.standard_normal(x.shape).astype(np.float32), params)


def batch_of():
    segments = np.ones((BATCH, LENGTH), np.int32)
    segments[1, 5:] = 2
    segments[2, 9:] = 0
    segments[3, 3:] = 2
    segments[3, 7:] = 3
    tokens = np.random.default_rng(2).integers(0, VOCAB, (BATCH, LENGTH)).astype(np.int32)
    return {"tokens": tokens, "segment_ids": segments}


def value_and_gradient(model, execution):
    def number(params, batch):
        output = Transformer(model, execution).apply({"params": params}, **batch)
        logits = output.logits
        weights = jnp.cos(jnp.arange(logits.size, dtype=jnp.float32)).reshape(logits.shape)
        weights = jnp.where(batch["segment_ids"][..., None] > 0, weights, 0.0)
        return jnp.sum(logits * weights) + sum(output.losses.values())

    return jax.jit(jax.value_and_grad(number))


@functools.cache
def on_one_device(name):
    batch = jax.tree.map(jnp.asarray, batch_of())
    return value_and_gradient(model_of(name), ExecutionConfig())(params_of(name), batch)


CONTIGUOUS = RingConfig(layout="contiguous")
MESHES = {
    "tensor2": ExecutionConfig(mesh=MeshConfig(tensor=2)),
    "data2_tensor2_zero2": ExecutionConfig(mesh=MeshConfig(data=2, tensor=2), rules="zero2"),
    "data2_expert2": ExecutionConfig(
        mesh=MeshConfig(data=2, expert=2), rules="fully_sharded", remat="full"
    ),
    "seq2": ExecutionConfig(mesh=MeshConfig(seq=2), sequence_parallel=CONTIGUOUS),
    "seq2_tensor2": ExecutionConfig(
        mesh=MeshConfig(seq=2, tensor=2),
        remat="full",
        sequence_parallel=AutoSequenceParallelConfig(),
    ),
    "seq4": ExecutionConfig(mesh=MeshConfig(seq=4), sequence_parallel=CONTIGUOUS),
}


def mesh_of(execution):
    return make_mesh(execution.mesh, jax.devices()[: math.prod(execution.mesh.sizes)])


def spread(name, execution, mesh):
    table = parameter_table(model_of(name), rules=execution.axis_rules)
    return jax.device_put(params_of(name), table.tree(lambda row: NamedSharding(mesh, row.spec)))


@pytest.mark.slow
@pytest.mark.rows(4)
@pytest.mark.parametrize("mesh_name", MESHES)
@pytest.mark.parametrize("name", MIXERS)
def test_layers_with_a_state_are_the_same_on_every_mesh(name, mesh_name):
    execution = MESHES[mesh_name]
    mesh = mesh_of(execution)
    desired = on_one_device(name)
    with jax.set_mesh(mesh):
        actual = value_and_gradient(model_of(name), execution)(
            spread(name, execution, mesh), global_batch(batch_of(), mesh)
        )
    assert_close(actual, desired, "end_to_end")


def decode(name, params, prompts, execution=None):
    return generate(
        model_of(name),
        params,
        prompts,
        num_tokens=4,
        key=jax.random.key(0),
        temperature=0.0,
        execution=execution,
    )


@pytest.mark.slow
@pytest.mark.rows(4)
@pytest.mark.parametrize("name", MIXERS)
def test_decoded_tokens_are_those_of_the_whole_forward(name):
    """Prompts of unequal length, padded on the right; on one device and on a mesh."""
    lengths = (5, 9, 1, 12)
    rows = batch_of()["tokens"]
    prompts = [row[:count].tolist() for row, count in zip(rows, lengths, strict=True)]
    params = params_of(name)
    tokens = np.asarray(decode(name, params, prompts))
    model = model_of(name)
    forward = jax.jit(lambda tokens: Transformer(model).apply({"params": params}, tokens).logits)
    for prompt, new in zip(prompts, tokens, strict=True):
        text = np.zeros((1, 16), np.int32)
        text[0, : len(prompt) + 4] = [*prompt, *new]
        likeliest = np.argmax(np.asarray(forward(jnp.asarray(text)))[0], axis=-1)
        np.testing.assert_array_equal(likeliest[len(prompt) - 1 :][:4], new)
    assert len(np.unique(tokens)) > 2, "one token for ever would prove little"
    execution = ExecutionConfig(mesh=MeshConfig(data=2, tensor=2))
    mesh = mesh_of(execution)
    with jax.set_mesh(mesh):
        spread_params = spread(name, execution, mesh)
        tokens = decode(name, spread_params, rows[:, :5], execution)
    np.testing.assert_array_equal(tokens, decode(name, params, rows[:, :5]))


@pytest.mark.parametrize(
    ("mixer", "field"),
    [
        (choice("mixer", "short_convolution")(num_channels=12), "num_channels"),
        (choice("mixer", "gated_delta")(num_heads=16, num_key_heads=4), "num_key_heads"),
        (choice("mixer", "lightning")(num_heads=12), "num_heads"),
    ],
)
def test_sizes_that_do_not_divide_name_the_field_of_their_mixer(mixer, field):
    attention = AttentionConfig(num_heads=8, num_kv_heads=8, head_dim=8)
    layers = (LayerConfig(mixer=mixer), LayerConfig())
    model = dataclasses.replace(
        model_of("short_convolution"), layers=layers, attention=attention, moe=None, dense_dim=16
    )
    sizes = {axis: 8 if axis == "tensor" else 1 for axis in MESH_AXES}
    text = f"set model.layers.0.mixer.{field} to a multiple of 8 or mesh.tensor to "
    with pytest.raises(ValueError, match=text):
        parameter_table(model).check_divides(ExecutionConfig().axis_rules, sizes)
