# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Models of recurrent and attending layers: on meshes, decoded, and refused on cut sequences."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jaxmoe import combinations
from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.mixers import AttentionConfig, Mamba2Config, MambaConfig
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
MAMBA = Mamba2Config(num_heads=4, head_dim=8, state_dim=6, num_groups=2, chunk=4)
MODEL = ModelConfig(
    vocab_size=VOCAB,
    num_layers=4,
    embed_dim=16,
    attention=AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8),
    moe=MoEConfig(num_experts=4, top_k=2, expert_dim=12),
    layers=(LayerConfig(mixer=MAMBA), LayerConfig()),
)
"""Two repeats of a recurrent and an attending layer, with experts."""


@functools.cache
def params_of(model=MODEL):
    params = init_params(model, jax.random.key(0))
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda x: x + 0.1 * rng.standard_normal(x.shape).astype(np.float32), params)


def batch_of():
    segments = np.ones((BATCH, LENGTH), np.int32)
    segments[1, 5:], segments[2, 9:] = 2, 0
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
def on_one_device(model=MODEL):
    given = jax.tree.map(jnp.asarray, batch_of())
    return value_and_gradient(model, ExecutionConfig())(params_of(model), given)


CONTIGUOUS = RingConfig(layout="contiguous")
MESHES = {
    "tensor2": ExecutionConfig(mesh=MeshConfig(tensor=2)),
    "data2_tensor2_zero2": ExecutionConfig(mesh=MeshConfig(data=2, tensor=2), rules="zero2"),
    "data2_expert2": ExecutionConfig(
        mesh=MeshConfig(data=2, expert=2), rules="fully_sharded", remat="full"
    ),
    "one group, tensor2": ExecutionConfig(mesh=MeshConfig(tensor=2)),
    "mamba, data2_tensor2": ExecutionConfig(mesh=MeshConfig(data=2, tensor=2)),
    "tensor4": ExecutionConfig(mesh=MeshConfig(tensor=4)),
    "seq2": ExecutionConfig(mesh=MeshConfig(seq=2), sequence_parallel=CONTIGUOUS),
    "seq2_data2": ExecutionConfig(
        mesh=MeshConfig(seq=2, data=2),
        rules="fully_sharded",
        sequence_parallel=AutoSequenceParallelConfig(),
    ),
    "seq2_tensor2": ExecutionConfig(
        mesh=MeshConfig(seq=2, tensor=2),
        remat="full",
        sequence_parallel=AutoSequenceParallelConfig(),
    ),
    "mamba, seq2_tensor2": ExecutionConfig(
        mesh=MeshConfig(seq=2, tensor=2), sequence_parallel=CONTIGUOUS
    ),
    "seq4": ExecutionConfig(mesh=MeshConfig(seq=4), sequence_parallel=CONTIGUOUS),
}
SHORT = ("seq2",)
ROWS = [pytest.param(name, marks=() if name in SHORT else pytest.mark.slow) for name in MESHES]


def mesh_of(execution):
    return make_mesh(execution.mesh, jax.devices()[: math.prod(execution.mesh.sizes)])


def spread(model, execution, mesh):
    table = parameter_table(model, rules=execution.axis_rules)
    return jax.device_put(params_of(model), table.tree(lambda row: NamedSharding(mesh, row.spec)))


@pytest.mark.parametrize("name", ROWS)
def test_recurrent_layers_are_the_same_on_every_mesh(name):
    model = MODEL
    if name.startswith("one group"):
        mixer = dataclasses.replace(MAMBA, num_groups=1)
        model = dataclasses.replace(MODEL, layers=(LayerConfig(mixer=mixer), LayerConfig()))
    if name.startswith("mamba,"):
        mixer = MambaConfig(
            **{"inner_dim": 16, "state_dim": 4, "step_rank": 2, "chunk": 4},
            **{"inner_norms": "rms", "has_projection_bias": True},
        )
        model = dataclasses.replace(MODEL, layers=(LayerConfig(mixer=mixer), LayerConfig()))
    if name == "tensor4":  # two devices for each group of heads
        full = dataclasses.replace(MODEL.attention, num_kv_heads=4)
        model = dataclasses.replace(MODEL, attention=full)
    execution = MESHES[name]
    mesh = mesh_of(execution)
    with jax.set_mesh(mesh):
        found = value_and_gradient(model, execution)(
            spread(model, execution, mesh), global_batch(batch_of(), mesh)
        )
    assert_close(found, on_one_device(model), "end_to_end")


def written(params, prompts, execution=None):
    return generate(
        MODEL,
        params,
        prompts,
        num_tokens=4,
        key=jax.random.key(0),
        temperature=0.0,
        execution=execution,
    )


def test_decoded_tokens_are_those_of_the_whole_forward():
    """Prompts of unequal length, padded on the right."""
    prompts = [
        row[:count].tolist() for row, count in zip(batch_of()["tokens"], (5, 9, 1, 12), strict=True)
    ]
    params = params_of()
    found = written(params, prompts)
    whole = jax.jit(lambda tokens: Transformer(MODEL).apply({"params": params}, tokens).logits)
    for prompt, new in zip(prompts, np.asarray(found), strict=True):
        text = np.zeros((1, 16), np.int32)
        text[0, : len(prompt) + 4] = [*prompt, *new]
        likeliest = np.argmax(np.asarray(whole(jnp.asarray(text)))[0], axis=-1)
        np.testing.assert_array_equal(likeliest[len(prompt) - 1 :][:4], new)
    assert len(np.unique(found)) > 2, "one token for ever would prove little"


@pytest.mark.slow
def test_decoded_tokens_are_the_same_on_a_mesh():
    """Over seq, which a state does not cut, as over tensor."""
    execution = ExecutionConfig(mesh=MeshConfig(data=2, tensor=2))
    mesh, prompts = mesh_of(execution), batch_of()["tokens"][:, :5]
    with jax.set_mesh(mesh):
        found = written(spread(MODEL, execution, mesh), prompts, execution)
    np.testing.assert_array_equal(found, written(params_of(), prompts))


@pytest.mark.parametrize(
    ("layers", "field"),
    [
        ((LayerConfig(), LayerConfig(mixer=MAMBA)), "model.layers.1.mixer.num_heads"),
        ((LayerConfig(mixer=MambaConfig(inner_dim=12)),), "model.layers.0.mixer.inner_dim"),
        ((), "model.attention.num_kv_heads"),
    ],
    ids=["mamba2", "mamba", "attention"],
)
def test_sizes_that_do_not_divide_name_the_field_of_their_mixer(layers, field):
    heads = 8 if layers else 12
    attention = AttentionConfig(num_heads=heads, num_kv_heads=heads, head_dim=8)
    model = dataclasses.replace(MODEL, layers=layers, attention=attention, moe=None, dense_dim=16)
    sizes = {axis: 8 if axis == "tensor" else 1 for axis in MESH_AXES}
    with pytest.raises(ValueError, match=f"set {field} to a multiple of 8 or mesh.tensor to "):
        parameter_table(model).check_divides(ExecutionConfig().axis_rules, sizes)


def test_plans_count_a_state_where_there_is_one():
    """FLOPs and bytes of Mamba-2 by hand: no term with the length but the states of chunks."""
    found = MAMBA.activations(lambda _: 2, itemsize=2)
    narrow, shared, heads = 2 * 8 * 2, 2 * 2 * 6 * 2, 2
    assert found.projected == 2 * narrow + shared + 4 * heads and found.output == narrow
    longer = dataclasses.replace(MAMBA, chunk=8).activations(lambda _: 2, itemsize=2)
    assert found.working - longer.working == 2 * 8 * 4 * 6 * (1 / 4 - 1 / 8)
    assert MODEL.context.heads == (MODEL.attention.heads,)


def test_cut_sequences_in_another_order_are_refused():
    execution = ExecutionConfig(mesh=MeshConfig(seq=2), sequence_parallel=RingConfig())
    with pytest.raises(ValueError, match="the state of .*mamba2.*layout=zigzag is another"):
        combinations.check(model=MODEL, execution=execution)
