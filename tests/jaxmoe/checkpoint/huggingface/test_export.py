# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Models written for transformers: read back bit by bit, in files of any size, and refused where
they are no member of a family.

That transformers reads them and computes the same is in test_huggingface_parity.py.
"""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxmoe.checkpoint import CheckpointError, read_huggingface, to_huggingface
from jaxmoe.checkpoint.huggingface import describe
from jaxmoe.checkpoint.huggingface.export import suggest_family
from jaxmoe.checkpoint.huggingface.family import FAMILIES
from jaxmoe.checkpoint.huggingface.files import Planned, open_tensors, write_tensors
from jaxmoe.models.config import (
    AttentionConfig,
    ForwardMultipliers,
    LatentAttentionConfig,
    ModelConfig,
    MoEConfig,
)
from jaxmoe.routing import (
    METHODS,
    CapacityConfig,
    GroupLimitConfig,
    LossFreeConfig,
    RenormalizedGateConfig,
    SigmoidTopKConfig,
    SoftmaxGateConfig,
    SoftmaxTopKConfig,
    SqrtGateConfig,
)
from jaxmoe.scaling.initialize import parameter_table
from sharding import MeshConfig, make_mesh
from tests.support.huggingface_models import CONFIGS, FILE_TYPES, family_options, read
from tests.support.tolerances import assert_close


def assert_same(actual, desired):
    jax.tree.map(np.testing.assert_array_equal, actual, desired)


@pytest.fixture(params=CONFIGS)
def golden(request):
    return read(request.param)


@pytest.fixture
def olmoe():
    """A model and its parameters."""
    golden = read("olmoe")
    return read_huggingface(golden.config, golden.state)[:2]


@pytest.mark.parametrize("experts", ["each", "stacked"])
def test_export_import_export_is_identical(golden, tmp_path, experts):
    """Every tensor of transformers comes back with its name, shape and bits."""
    model, params, state = read_huggingface(golden.config, golden.state)
    given = {"router_state": state, "experts": experts, **family_options(golden.config)}
    place = to_huggingface(model, params, tmp_path / "deep" / "it", **given)
    assert not [path for path in place.parent.iterdir() if path != place]
    assert_same(tuple(read_huggingface(place)), (model, params, state))
    tensors = open_tensors(place)
    is_stacked_on_disk = not any(".experts.0." in name for name in golden.state)
    if experts == "stacked":
        assert len(tensors) < len(golden.state) or is_stacked_on_disk
        return
    assert tensors.keys() == golden.state.keys()
    values = {name: np.asarray(tensors[name]) for name in tensors}
    for name, constant in FAMILIES[golden.config["model_type"]]().constants(model).items():
        computed, stored = values.pop(name), golden.state.pop(name)
        if constant.is_read:
            assert_close(computed, stored, "elementwise")  # exponentials
        else:
            assert computed.shape == stored.shape and not computed.any()
    assert_same(values, golden.state)
    written = json.loads((place / "config.json").read_text())
    name = golden.config["model_type"]
    config = golden.config | {"model_type": FILE_TYPES.get(name, name)}
    wrong = {
        name: (value, written.get(name))
        for name, value in config.items()
        if name != "router_aux_loss_coef" and written.get(name) != value
    }
    assert not wrong, wrong
    if "rope_theta" in golden.config.get("rope_parameters", {}):
        assert written["rope_theta"] == golden.config["rope_parameters"]["rope_theta"]
    coefficient = golden.config.get("router_aux_loss_coef", 0.0)
    assert written.get("router_aux_loss_coef", 0.0) == pytest.approx(coefficient)
    assert written["architectures"] == [FAMILIES[golden.config["model_type"]].architecture]


def test_export_splits_files_by_size(golden, tmp_path):
    """Odd widths over many files, each within the limit unless one tensor exceeds it."""
    model, params, state = read_huggingface(golden.config, golden.state)
    limit = 3_000
    given = {"router_state": state, "max_shard_bytes": limit, **family_options(golden.config)}
    place = to_huggingface(model, params, tmp_path / "it", **given)
    index = json.loads((place / "model.safetensors.index.json").read_text())
    sizes = {name: value.size * 4 for name, value in golden.state.items()}
    assert index["metadata"]["total_size"] == sum(sizes.values())
    for file in place.glob("*.safetensors"):
        names = [name for name, where in index["weight_map"].items() if where == file.name]
        assert names and (len(names) == 1 or sum(sizes[name] for name in names) <= limit)
    assert_same(tuple(read_huggingface(place)), (model, params, state))


BIASES = ("correction_bias", "expert_bias")
"""Ends of the names of biases of routers, which are state."""


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_export_in_narrow_dtypes(golden, tmp_path, dtype):
    """bfloat16 rounds the float16 values; biases stay float32."""
    model, params, state = read_huggingface(golden.config, golden.state)
    given = {"router_state": state, "dtype": dtype}
    place = to_huggingface(model, params, tmp_path / "it", **given)
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16
    rounded = {
        name: value if name.endswith(BIASES) else value.astype(kind)
        for name, value in golden.state.items()
    }
    assert_same(read_huggingface(place), read_huggingface(golden.config, rounded))
    stored = {name: tensor.dtype for name, tensor in open_tensors(place).items()}
    assert {name for name in stored if stored[name] != dtype} == {
        name for name in stored if name.endswith(BIASES)
    }


def test_export_of_parameters_on_a_mesh(tmp_path):
    golden = read("mixtral")
    mesh = make_mesh(MeshConfig(data=2), devices=jax.devices()[:2])
    model, params, _ = read_huggingface(golden.config, golden.state, mesh=mesh)
    place = to_huggingface(model, params, tmp_path / "it")
    assert_same(read_huggingface(place), read_huggingface(golden.config, golden.state))


def test_export_of_bfloat16_numpy_parameters(olmoe, tmp_path):
    """Parameters may be anything that can be sliced, such as memory-mapped files."""
    model, params = olmoe
    narrow = jax.tree.map(lambda x: np.asarray(x).astype(ml_dtypes.bfloat16), params)
    found = read_huggingface(to_huggingface(model, narrow, tmp_path / "it")).params
    assert_same(found, jax.tree.map(lambda x: x.astype(np.float32), narrow))


def test_files_equal_those_of_the_safetensors_package(tmp_path):
    from safetensors.numpy import load_file, save_file

    rng = np.random.default_rng(0)
    arrays = {
        "b": rng.normal(size=(3, 5)).astype(np.float32),
        "a": rng.normal(size=7).astype(ml_dtypes.bfloat16),
        "c": np.float32(rng.normal(size=(2, 0, 3))),
    }
    planned = {name: Planned(x.shape, str(x.dtype)) for name, x in arrays.items()}
    write_tensors(tmp_path, planned, arrays.__getitem__, max_shard_bytes=10**9)
    assert_same(load_file(tmp_path / "model.safetensors"), arrays)
    save_file(arrays, tmp_path / "theirs.safetensors")
    sizes = [(tmp_path / f"{name}.safetensors").stat().st_size for name in ("model", "theirs")]
    assert abs(sizes[0] - sizes[1]) < 64  # the same, but for the header's "format"


def test_export_reads_one_layer_at_a_time(tmp_path):
    """No stacked parameter is read as a whole."""
    golden = read("deepseek_v3")
    model, params, state = read_huggingface(golden.config, golden.state)
    layers = []

    class Watched:
        def __init__(self, path, array):
            self.path, self.array, self.shape = path, np.asarray(array), array.shape

        def __getitem__(self, index):
            assert isinstance(index, int)
            layers.append((self.path, index))
            return self.array[index]

        def __array__(self, dtype=None, copy=None):
            assert "blocks" not in self.path
            return self.array

    watched = jax.tree_util.tree_map_with_path(lambda p, x: Watched(str(p), x), params)
    to_huggingface(model, watched, tmp_path / "it", router_state=state)
    assert len(layers) == len(set(layers))  # and each of them once
    blocks = [row for row in parameter_table(model) if "blocks" in row.path]
    assert len(layers) == sum(row.shape[0] for row in blocks)


# What is no member of a family.


def refused(model, params, place, **given):
    with pytest.raises(CheckpointError) as caught:
        to_huggingface(model, params, place, **given)
    assert not place.exists() and not list(place.parent.iterdir())
    return str(caught.value)


MOE = MoEConfig(router=SoftmaxTopKConfig(softmax="before"), gate=SoftmaxGateConfig())
OLMOE = ModelConfig(moe=MOE, attention=AttentionConfig(qk_norm="full"))
DEEPSEEK = ModelConfig(
    attention=LatentAttentionConfig(),
    moe=MoEConfig(router=SigmoidTopKConfig(), num_shared_experts=1),
)


def moe(**changes):
    return dataclasses.replace(OLMOE, moe=dataclasses.replace(MOE, **changes))


OTHERS = {
    "SqrtGate": (moe(gate=SqrtGateConfig()), "model.moe.gate: sqrt here, softmax in olmoe"),
    "multipliers": (
        dataclasses.replace(OLMOE, multipliers=ForwardMultipliers(residual=0.5, logits=0.1)),
        "model.multipliers.logits: 0.1 here, 1.0 in olmoe\n"
        "  model.multipliers.residual: 0.5 here, 1.0 in olmoe",
    ),
    "router": (
        moe(router=SigmoidTopKConfig()),
        "model.moe.router: sigmoid_topk here, softmax_topk in olmoe",
    ),
    "order": (
        moe(router=SoftmaxTopKConfig(softmax="after")),
        'model.moe.router.softmax: "after" here, "before" in olmoe',
    ),
    "scale": (
        moe(gate=RenormalizedGateConfig(scale=2.5)),
        "model.moe.gate.scale: 2.5 here, 1.0 in olmoe",
    ),
    "shared": (moe(num_shared_experts=1), "model.moe.num_shared_experts: 1 here, 0 in olmoe"),
    "capacity": (moe(capacity=CapacityConfig()), "model.moe.capacity"),
    "head width": (
        dataclasses.replace(OLMOE, attention=AttentionConfig(qk_norm="full", head_dim=8)),
        "model.attention.head_dim: 8 here, 32 in olmoe",
    ),
    "gated heads": (
        dataclasses.replace(OLMOE, attention=AttentionConfig(qk_norm="full", is_gated=True)),
        "model.attention.is_gated: true here, false in olmoe",
    ),
    "dense layers": (
        dataclasses.replace(OLMOE, dense_layers=(0,)),
        "model.dense_layers: [0] here, [] in olmoe",
    ),
    "all dense": (dataclasses.replace(OLMOE, moe=None), "model.moe: null here"),
    "not causal": (
        dataclasses.replace(
            OLMOE, attention=AttentionConfig(qk_norm="full", is_causal=False, softcap=5.0)
        ),
        "model.attention.is_causal: false here, true in olmoe\n"
        "  model.attention.softcap: 5.0 here, null in olmoe",
    ),
    "groups": (
        dataclasses.replace(
            DEEPSEEK,
            moe=dataclasses.replace(
                DEEPSEEK.moe,
                router=SigmoidTopKConfig(groups=GroupLimitConfig(num_groups=2, top_groups=1)),
                top_k=3,
            ),
        ),
        "model.moe.router.groups.best_per_group: 3 here, 2 in deepseek_v3",
    ),
    "latent norm": (
        dataclasses.replace(DEEPSEEK, attention=LatentAttentionConfig(norm_epsilon=1e-3)),
        "model.attention.norm_epsilon: 0.001 here, 1e-06 in deepseek_v3",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_a_family_does_not_compute_is_refused(name, tmp_path):
    model, line = OTHERS[name]
    text = refused(model, {}, tmp_path / "it")
    assert re.match("(olmoe|deepseek_v3) of transformers does not compute this model, and", text)
    assert f"\n  {line}" in text


def test_hyperp_is_refused_by_all_families(tmp_path):
    parts = METHODS["hyperp"]
    hyperp = dataclasses.replace(
        ModelConfig(),
        moe=MoEConfig(router=parts.router, gate=parts.gate, num_shared_experts=1),
        multipliers=ForwardMultipliers(residual=0.3, attention_scale=0.2),
    )
    for family in ("olmoe", "mixtral", "qwen3_moe"):
        text = refused(hyperp, {}, tmp_path / "it", family=family)
        assert re.search("model.moe.gate: sqrt here, (softmax|renormalized) in", text)
    text = refused(hyperp, {}, tmp_path / "it", family="deepseek_v3")
    assert text.startswith("DeepSeek-V3 has the attention latent")


def test_all_other_members_of_unions_are_refused(tmp_path):
    """Every routing method is one of a family, or refused."""
    known = {"olmoe": "olmoe", "mixtral": "mixtral", "qwen3": "qwen3_moe"}
    norms = {"olmoe": "full", "mixtral": "none", "qwen3_moe": "head"}
    found = set()
    for name, method in METHODS.items():
        is_causal = method.router.traits.is_causal
        for family, norm in norms.items():
            if not is_causal:
                continue
            parts = {"router": method.router, "gate": method.gate, "capacity": method.capacity}
            parts |= {"balancers": method.balancers}
            part = MoEConfig(**parts, zero_computation=method.zero_computation)
            model = ModelConfig(moe=part, attention=AttentionConfig(qk_norm=norm))
            fields = FAMILIES[family]().fields(model)
            try:
                describe.check_described(model, FAMILIES[family]().model(fields), family)
            except CheckpointError:
                assert known.get(name) != family
            else:
                found.add((name, family))
    assert found >= set(known.items())
    routers = {name: METHODS[name].router for name, _ in found}
    assert all(isinstance(router, SoftmaxTopKConfig) for router in routers.values()), found


def test_training_only_fields_are_not_compared():
    """Balancers, jitter, and the update of biases are ignored."""
    golden = read("deepseek_v3")
    model = read_huggingface(golden.config, golden.state).model
    parts = METHODS["deepseek_v3"]
    router = dataclasses.replace(parts.router, groups=model.moe.router.groups, jitter=0.1)
    other = dataclasses.replace(model.moe, router=router, balancers=parts.balancers)
    other = dataclasses.replace(model, moe=other)
    family = FAMILIES["deepseek_v3"]()
    assert family.fields(other) == family.fields(model)
    describe.check_described(other, model, "deepseek_v3")
    scale = ForwardMultipliers(attention_scale=model.attention.head_dim**-0.5)
    describe.check_described(dataclasses.replace(other, multipliers=scale), model, "deepseek_v3")
    with pytest.raises(CheckpointError, match="multipliers.attention_scale: 0.5 here, null in "):
        scale = ForwardMultipliers(attention_scale=0.5)
        describe.check_described(
            dataclasses.replace(other, multipliers=scale), model, "deepseek_v3"
        )


# What else can be wrong.


def test_export_lists_all_wrong_parameters(olmoe, tmp_path):
    model, params = olmoe
    params = jax.tree.map(lambda x: x, params)
    block = params["moe_blocks_0"]
    block["attention"]["qq"] = block["attention"].pop("q")
    params["head"]["weight"] = params["head"]["weight"].T
    assert refused(model, params, tmp_path / "it").splitlines() == [
        "these are not the model's parameters (3 differ):",
        "  head/weight: found [26, 36], expected [36, 26]",
        "  moe_blocks_0/attention/q: missing, expected [2, 36, 3, 12]",
        "  moe_blocks_0/attention/qq: found [2, 36, 3, 12], not in this model: did you mean"
        " 'moe_blocks_0/attention/q'?",
    ]


def test_export_requires_router_biases(tmp_path):
    golden = read("deepseek_v3")
    model, params, _ = read_huggingface(golden.config, golden.state)
    text = refused(model, params, tmp_path / "it")
    assert text.startswith("the model's routers have biases, which are state and not parameters: g")
    wrong = {"bias": jnp.zeros((3, 6))}
    text = refused(model, params, tmp_path / "it", router_state=wrong)
    assert "router_state/bias: found [3, 6], expected [2, 6]" in text
    router = dataclasses.replace(model.moe.router, bias=None)
    without = dataclasses.replace(model, moe=dataclasses.replace(model.moe, router=router))
    to_huggingface(without, params, tmp_path / "without")  # the family has one: of zeros
    assert not np.asarray(read_huggingface(tmp_path / "without")[2]["bias"]).any()


def test_export_refuses_biases_of_routers_in_a_family_without_them(tmp_path):
    golden = read("llama4_text")
    model, params, _ = read_huggingface(golden.config, golden.state)
    router = dataclasses.replace(model.moe.router, bias=LossFreeConfig())
    biased = dataclasses.replace(model, moe=dataclasses.replace(model.moe, router=router))
    text = refused(biased, params, tmp_path / "it", family="llama4_text")
    assert "  model.moe.router.bias: loss_free here, null in llama4_text" in text.splitlines()


def test_export_takes_a_family_that_turns_parts_of_heads(tmp_path):
    """Families that turn whole heads read no other share, and so do not describe it."""
    golden = read("glm4_moe")
    model, params, state = read_huggingface(golden.config, golden.state)
    text = refused(model, params, tmp_path / "it", router_state=state, family="dots1")
    assert "config.partial_rotary_factor=0.75 is not supported, only 1.0: RoPE of this" in text
    assert suggest_family(model) == ("glm4_moe", "")


def test_export_refuses_existing_directories(olmoe, tmp_path, monkeypatch):
    model, params = olmoe
    text = refused(model, params, tmp_path / "it", family="olmo")
    names = ", ".join((*FAMILIES, "jaxmoe"))
    assert text == f"family='olmo' is not among {names}: did you mean 'olmoe'?"
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000})())
    assert "GB and the disk has 0.0 GB free" in refused(model, params, tmp_path / "it")
    monkeypatch.undo()
    place = tmp_path / "it"
    place.mkdir()
    to_huggingface(model, params, place)
    with pytest.raises(CheckpointError, match="it exists already: give a new or an empty dir"):
        to_huggingface(model, params, place)


def test_failed_export_leaves_no_files(olmoe, tmp_path, monkeypatch):
    model, params = olmoe

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("jaxmoe.checkpoint.huggingface.export._layer", full)
    with pytest.raises(OSError, match="No space"):
        to_huggingface(model, params, tmp_path / "it")
    assert not list(tmp_path.iterdir())


def test_export_writes_token_ids_of_the_tokenizer(olmoe, tmp_path):
    model, params = olmoe
    given = {"fields": {"bos_token_id": 3}, "max_length": 77}
    place = to_huggingface(model, params, tmp_path / "it", **given)
    written = json.loads((place / "config.json").read_text())
    assert (written["bos_token_id"], written["eos_token_id"]) == (3, None)
    assert written["max_position_embeddings"] == 77
    given = {"fields": {"eos_token_id": 5}, "family": "jaxmoe"}
    own = to_huggingface(model, params, tmp_path / "own", **given)
    asked = json.loads((own / "generation_config.json").read_text())
    assert asked == {"use_cache": False, "eos_token_id": 5}
