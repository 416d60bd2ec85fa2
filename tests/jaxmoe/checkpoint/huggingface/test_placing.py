# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Parameters are placed while they are read: the same values, in the memory of a part."""

import contextlib
import json
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jaxmoe.checkpoint.huggingface import open_huggingface, placing, to_huggingface, weights
from jaxmoe.checkpoint.huggingface.files import Planned, StoredTensor, write_tensors
from jaxmoe.models.config import AttentionConfig, ModelConfig, MoEConfig
from jaxmoe.scaling.initialize import parameter_table
from sharding import MeshConfig, make_mesh
from sharding.rules import FULLY_SHARDED
from tests.experiments.test_convert_memory import shapes_of

MODEL = ModelConfig(
    vocab_size=32,
    num_layers=3,
    embed_dim=16,
    attention=AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=4, qk_norm="full"),
    moe=MoEConfig(num_experts=4, top_k=2, expert_dim=8),
)
MESHES = [
    None,
    MeshConfig(data=8),
    MeshConfig(data=2, expert=2, tensor=2),
    MeshConfig(replica=2, expert=4),
]


@pytest.fixture(scope="module", params=["each", "stacked"])
def stored(request, tmp_path_factory):
    """A model on disk, one tensor for each expert or for all of a layer, and its parameters."""
    rng = np.random.default_rng(0)
    params = parameter_table(MODEL).tree(
        lambda row: jnp.asarray(rng.standard_normal(row.shape), jnp.float32)
    )
    place = tmp_path_factory.mktemp("model") / request.param
    to_huggingface(MODEL, params, place, experts=request.param, max_shard_bytes=4096)
    return place, params


@pytest.mark.parametrize("kind", [placing.HostShard, placing.DeviceShard])
@pytest.mark.parametrize("config", MESHES, ids=str)
@pytest.mark.parametrize("part", [1, 2**28])
def test_shards_have_the_values_of_the_tensors(stored, config, kind, part, monkeypatch):
    """On every mesh, by both ways, whole layers or single experts; each tensor is read once."""
    place, params = stored
    reads = {}

    def read(self, dtype=None, copy=None):
        reads[self.file, self.start] = reads.get((self.file, self.start), 0) + 1
        return plain(self, dtype, copy)

    plain = StoredTensor.__array__
    monkeypatch.setattr(StoredTensor, "__array__", read)
    monkeypatch.setattr(placing, "_new_shard", kind)
    monkeypatch.setattr(weights, "_PART", part)
    mesh = None if config is None else make_mesh(config)
    _, tensors = open_huggingface(place)
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        loaded, _ = placing.load(tensors, mesh=mesh, axis_rules=FULLY_SHARDED, dtype="bfloat16")
    for row in tensors.table:
        array, expected = loaded, params
        for name in row.path.split("/"):
            array, expected = array[name], expected[name]
        assert array.dtype == jnp.bfloat16
        assert mesh is None or array.sharding == NamedSharding(mesh, row.spec)
        np.testing.assert_array_equal(np.asarray(array), expected.astype(jnp.bfloat16))
    # The tensor of gate and up of all experts fills two halves of a parameter at once.
    assert set(reads.values()) == {1}


def test_only_the_experts_of_a_process_are_read(stored):
    """As the parts that no device of the process needs are passed over."""
    place, _ = stored
    _, tensors = open_huggingface(place)
    row = next(row for row in tensors.table if "down" in row.path)
    (second,) = tensors.parts(row, lambda part: part[0] == (1, 2))
    np.testing.assert_array_equal(second[1][0], tensors.read(row, 1))
    assert second[0] == ((1, 2), *((0, size) for size in row.shape[1:]))


FIELDS = {
    "model_type": "olmoe",
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "vocab_size": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "norm_topk_prob": False,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}


def _overhead(place, layers, part):
    """Bytes that reading takes beyond the parameters in bfloat16, and those of a layer."""
    fields = {**FIELDS, "num_hidden_layers": layers}
    place.mkdir()
    (place / "config.json").write_text(json.dumps(fields))
    planned = {name: Planned(shape, "bfloat16") for name, shape in shapes_of(fields)}
    ones = np.ones(2**16, "bfloat16")
    write_tensors(
        place, planned, lambda name: np.resize(ones, planned[name].shape), max_shard_bytes=2**22
    )
    _, tensors = open_huggingface(place)
    mesh = make_mesh(MeshConfig(data=2, expert=4))
    weights._PART = part
    tracemalloc.start()
    params, _ = placing.load(tensors, mesh=mesh, axis_rules=FULLY_SHARDED, dtype="bfloat16")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    return peak - size, 4 * 3 * 128 * 64 * 16


def test_memory_of_an_import_does_not_grow_with_the_model(tmp_path, monkeypatch):
    """Beside the parameters it is that of a part, whatever the number of layers and shards."""
    monkeypatch.setattr(weights, "_PART", weights._PART)
    small, layer = _overhead(tmp_path / "small", 4, 2**28)
    large, _ = _overhead(tmp_path / "large", 16, 2**28)
    assert large < small + 0.5 * layer and large < 2 * layer
    by_expert, _ = _overhead(tmp_path / "parts", 16, 2**17)
    assert by_expert < 0.7 * large
