# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Values narrower than keys: those of padded values, in caches and on meshes; sizes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from jaxmoe import generate
from jaxmoe.contrib.family_layers.narrow_values import NarrowValuesConfig
from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.mixers.attention_parts import AttentionOptions
from jaxmoe.layers.records import TokenInputs
from jaxmoe.models.config import AttentionConfig, LayerConfig
from jaxmoe.models.transformer import Transformer
from jaxmoe.scaling.initialize import parameter_table
from sharding import MeshConfig, make_mesh
from sharding.distributed import global_batch
from sharding.sequence_parallel import RingConfig
from tests.jaxmoe.layers.test_mesh_invariance import (
    loss_and_gradients,
    on_mesh,
    on_one_device,
    values_of,
)
from tests.support.models import LENGTH, TINY, tokens_for
from tests.support.tolerances import assert_close

ON_ONE = ExecutionConfig()
SIZES = {"num_heads": 4, "head_dim": 8, "qk_norm": "head"}
FULL = NarrowValuesConfig(**SIZES, num_kv_heads=2, value_dim=6, value_scale=0.7)
SLIDING = dataclasses.replace(
    FULL,
    num_kv_heads=4,
    window=3,
    rope_theta=40.0,
    options=AttentionOptions(has_sinks=True, rotary_dim=4),
)
MODEL = dataclasses.replace(
    TINY,
    num_layers=4,
    attention=FULL,
    layers=(LayerConfig(), LayerConfig(mixer=SLIDING)),
)
"""A full layer and one with a window, sinks and more keys, twice."""


@pytest.mark.parametrize("config", [FULL, SLIDING], ids=["full", "sliding"])
def test_values_are_those_of_attention_whose_weights_are_padded(config):
    """Attention as it is, with zeros in the features that narrow values do not have."""
    fields = {
        field.name: getattr(config, field.name) for field in dataclasses.fields(AttentionConfig)
    }
    wide = AttentionConfig(**fields)
    tokens = TokenInputs(token_mask=jnp.ones((2, 7), bool))
    x = jax.random.normal(jax.random.key(0), (2, 7, 16))
    layer = config.build(MODEL.context, ON_ONE)
    params = nn.meta.unbox(layer.init(jax.random.key(1), x, tokens, None))["params"]
    assert params["v"].shape == (16, config.num_kv_heads, 6) and params["o"].shape == (4, 6, 16)

    def pad(params):
        v = jnp.pad(params["v"] * jnp.float32(0.7), ((0, 0), (0, 0), (0, 2)))
        return params | {"v": v, "o": jnp.pad(params["o"], ((0, 0), (0, 2), (0, 0)))}

    def loss(module, transform):
        def run(params):
            y = module.apply({"params": transform(params)}, x, tokens, None)[0]
            return jnp.sum(jnp.sin(3.0 * y))

        return jax.jit(jax.value_and_grad(run))(params)

    ours = loss(layer, lambda params: params)
    assert_close(ours, loss(wide.build(MODEL.context, ON_ONE), pad), "matmul")


def test_tokens_from_a_cache_are_those_of_whole_passes():
    params = values_of(MODEL)
    prompts = tokens_for(MODEL)[0][:2]
    greedy = {"num_tokens": 4, "key": jax.random.key(0), "temperature": 0.0}
    tokens = generate(MODEL, params, prompts, **greedy)
    rows = jnp.concatenate([prompts, tokens], axis=1)
    logits = Transformer(MODEL).apply({"params": params}, rows).logits
    np.testing.assert_array_equal(logits[:, LENGTH - 1 : -1].argmax(-1), tokens)


def test_values_wider_than_keys_are_refused():
    with pytest.raises(ValueError, match="attention.value_dim=9 must be at most attention.head_di"):
        dataclasses.replace(FULL, value_dim=9)


def test_projections_count_the_width_of_values():
    table = parameter_table(MODEL)
    for stack in MODEL.stacks:
        paths = {f"{stack.path}/attention/{name}" for name in "qkvo"}
        size = sum(row.size for row in table if row.path in paths)
        counted = stack.kind.mixer.projection_parameters(MODEL.embed_dim)
        assert size == stack.num_layers * counted > 0


@pytest.mark.slow
@pytest.mark.rows(2)
@pytest.mark.parametrize(
    ("mesh", "rules"), [("data4_tensor2", "fully_sharded"), ("data2", "zero1")]
)
def test_a_mesh_changes_neither_loss_nor_gradients(mesh, rules):
    model = dataclasses.replace(MODEL, num_layers=2)
    assert_close(on_mesh(model, mesh, rules), on_one_device(model), "end_to_end")


@pytest.mark.slow
def test_rows_that_are_cut_change_neither_loss_nor_gradients():
    """A ring, which takes one width of keys and values."""
    sizes = MeshConfig(data=4, seq=2)
    form = RingConfig(layout="contiguous")
    execution = ExecutionConfig(mesh=sizes, sequence_parallel=form)
    model = dataclasses.replace(MODEL, layers=(), num_layers=2)
    with jax.set_mesh(mesh := make_mesh(sizes)):
        tokens, targets = map(np.asarray, tokens_for(model))
        batch = global_batch({"tokens": tokens, "targets": targets}, mesh)
        results = loss_and_gradients(model, execution)(values_of(model), batch)
    assert_close(results, on_one_device(model), "end_to_end")
