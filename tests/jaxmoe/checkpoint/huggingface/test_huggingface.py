# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Imported weights: golden logits, both layouts, files, and tensors that do not fit.

The golden arrays come from test_parity.py, which compares with transformers itself.
"""

import copy
import functools
import json
import re
import textwrap
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxmoe import Transformer, init_params
from jaxmoe.checkpoint import (
    CheckpointError,
    from_huggingface,
    huggingface,
    read_huggingface,
)
from jaxmoe.checkpoint.huggingface.family import FAMILIES
from jaxmoe.models.transformer import initial_router_state
from jaxmoe.routing.balancers import conversions, load_balance, pool_layers
from sharding import MeshConfig, make_mesh
from tests.support.huggingface_models import BALANCED, CONFIGS, SAME_IN_MEMORY, read, stacked
from tests.support.tolerances import assert_close


@pytest.fixture(params=CONFIGS)
def golden(request):
    return read(request.param)


@functools.cache
def imported(name):
    """The golden model of a family; tests do not change it."""
    return read_huggingface(read(name).config, read(name).state)


@pytest.fixture
def mixtral():
    """Config and tensors that a test may change."""
    found = read("mixtral")
    return copy.deepcopy(found.config), dict(found.state)


def assert_same(actual, desired):
    jax.tree.map(np.testing.assert_array_equal, actual, desired)


def test_every_family_has_golden_arrays():
    assert set(CONFIGS) == set(FAMILIES)


def test_logits_and_balance_loss(golden):
    model, params, state = imported(golden.config["model_type"])
    forward = jax.jit(
        lambda p, t: Transformer(model).apply({"params": p}, t, router_state=state or None)
    )
    output = forward(params, jnp.asarray(golden.tokens))
    assert_close(output.logits, golden.logits, "matmul")
    if golden.config["model_type"] not in BALANCED:
        return
    pooled = float(load_balance(pool_layers(output.statistics)))
    ours = conversions(float(load_balance(output.statistics).mean()), top_k=2, pooled=pooled)
    assert_close(ours["huggingface"], golden.balance, "matmul")
    assert abs(golden.balance - 2.0) > 0.05  # the uniform router's value would prove nothing


def test_imported_tree_is_that_of_init_params(golden, key):
    model, params, state = imported(golden.config["model_type"])
    wanted = jax.eval_shape(lambda k: (init_params(model, k), initial_router_state(model)), key)
    found = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (params, state))
    assert found == wanted
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(params))


def test_import_from_layout_in_memory(golden):
    """Experts stacked, gate before up; Mixtral's router under another name."""
    state = stacked(golden.state)
    is_same = golden.config["model_type"] in SAME_IN_MEMORY
    assert (state.keys() == golden.state.keys()) == is_same
    assert_same(read_huggingface(golden.config, state), imported(golden.config["model_type"]))


def test_import_onto_a_mesh(golden):
    # 36, 26 and 5 divide by little: two devices hold a half each.
    mesh = make_mesh(MeshConfig(data=2), devices=jax.devices()[:2])
    if "kv_lora_rank" in golden.config:  # latents of 7 and 9 divide by nothing
        text = "/(kv_b|q_b|index_q): the dimension 'embed' of size [79] must be divisible by mesh"
        with pytest.raises(ValueError, match=text):
            read_huggingface(golden.config, golden.state, mesh=mesh)
        return
    placed = read_huggingface(golden.config, golden.state, mesh=mesh).params
    table = placed["embedding"]["weight"]
    assert table.sharding.mesh == mesh and table.addressable_shards[0].data.size * 2 == table.size
    params = imported(golden.config["model_type"]).params
    assert_same(jax.device_get(placed), jax.device_get(params))


class Torch:
    """The used part of a PyTorch tensor; numpy cannot read one with a gradient or in bfloat16."""

    def __init__(self, values):
        self.values, self.shape, self.dtype = values, values.shape, "torch.bfloat16"

    def detach(self):
        return self

    cpu = detach

    def float(self):
        return self

    def numpy(self):
        return self.values

    def __array__(self):
        raise TypeError("unsupported ScalarType BFloat16")


def test_import_of_pytorch_tensors(golden):
    state = {name: Torch(values) for name, values in golden.state.items()}
    assert_same(read_huggingface(golden.config, state), imported(golden.config["model_type"]))


def test_stored_decays_must_be_those_of_the_config():
    """MiniMax stores them; files without them are read too."""
    config, state = read("minimax").config, read("minimax").state
    name = "model.layers.2.self_attn.slope_rate"
    assert_same(
        read_huggingface(config, {key: x for key, x in state.items() if key != name}),
        imported("minimax"),
    )
    with pytest.raises(ValueError, match=f"{name} is computed from the config here, and the sto"):
        read_huggingface(config, {**state, name: state[name] * 1.1})
    with pytest.raises(ValueError, match=f"{name}: found .3, 1., expected .3, 1, 1."):
        read_huggingface(config, {**state, name: state[name][:, :, 0]})


# Files.


def save(directory, config, shards):
    """Tensors as `save_pretrained` writes them: one file, or several and an index."""
    from safetensors.numpy import save_file

    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    names = [f"model-{i}.safetensors" for i in range(len(shards))]
    if len(shards) == 1:
        names = ["model.safetensors"]
    else:
        places = {key: name for name, part in zip(names, shards, strict=True) for key in part}
        index = {"metadata": {}, "weight_map": places}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    for name, part in zip(names, shards, strict=True):
        contiguous = {key: np.ascontiguousarray(values) for key, values in part.items()}
        save_file(contiguous, directory / name)
    return directory


def halves(state):
    names = sorted(state)
    return [{name: state[name] for name in part} for part in (names[::2], names[1::2])]


@pytest.mark.parametrize("num_files", [1, 2])
def test_import_of_a_directory(golden, tmp_path, num_files):
    """In bfloat16, as most weights are published; halves of float16 lose bits in it."""
    state = {name: values.astype(ml_dtypes.bfloat16) for name, values in golden.state.items()}
    place = save(tmp_path / "it", golden.config, [state] if num_files == 1 else halves(state))
    wanted = read_huggingface(golden.config, state)
    assert_same(read_huggingface(place), wanted)
    assert_same(read_huggingface(place / "config.json"), wanted)
    assert_same(read_huggingface(golden.config, place), wanted)
    if num_files == 1:
        assert_same(read_huggingface(place, place / "model.safetensors"), wanted)


@pytest.mark.slow
def test_docstring_example_runs(tmp_path, monkeypatch):
    golden = read("olmoe")
    other = save(tmp_path / "other", read("deepseek_v3").config, [read("deepseek_v3").state])
    monkeypatch.chdir(tmp_path)
    place = save(tmp_path / "it", golden.config, [golden.state])
    theirs = SimpleNamespace(
        config=SimpleNamespace(to_dict=lambda: golden.config), state_dict=lambda: golden.state
    )
    olmoe = SimpleNamespace(from_pretrained=lambda _: theirs)
    names = {"transformers": SimpleNamespace(OlmoeForCausalLM=olmoe)}
    block = huggingface.__doc__.partition("\n\n")[2].partition("    family.py")[0]
    block = textwrap.dedent(block).replace("OLMoE-1B-7B-0924", str(place))
    exec(block.replace("Moonlight-16B-A3B", str(other)), names)
    assert names["logits"].shape == (1, 3, 26)
    assert_same((names["model"], names["params"]), from_huggingface(place))
    assert_same(from_huggingface("mine"), from_huggingface(place))


def broken(path, error):
    with pytest.raises(CheckpointError) as caught:
        from_huggingface(path)
    text = str(caught.value)
    assert re.search(error, text), text


def test_damaged_directories_are_refused(mixtral, tmp_path):
    config, state = mixtral
    broken(tmp_path / "nothing", r"^cannot read .*nothing: No such file or directory$")
    place = tmp_path / "it"
    save(place, config, halves(state))
    whole = (place / "model-1.safetensors").read_bytes()
    (place / "model-1.safetensors").write_bytes(whole[:-5])
    broken(place, r"model-1\.safetensors is no whole safetensors file \(.*\): download it again$")
    (place / "model-1.safetensors").unlink()
    broken(place, r"^cannot read .*model-1\.safetensors: No such file or directory")
    index = place / "model.safetensors.index.json"
    fields = json.loads(index.read_text())
    fields["weight_map"] = {name: "model-0.safetensors" for name in fields["weight_map"]}
    index.write_text(json.dumps(fields))
    broken(place, r"index\.json names \d+ tensors that no file holds, model\..* first: download")
    index.write_text("{}")
    broken(place, r"index\.json: weight_map is null and must map tensors to files: download")
    index.unlink()
    (place / "model-0.safetensors").rename(place / "pytorch_model.bin")
    broken(place, r"no safetensors file but pytorch_model\.bin: save it again with safe_serial")
    (place / "config.json").write_text("{")
    broken(place, r"config\.json is not JSON \(Expecting property name")


# Tensors that do not fit.


def refused(config, state):
    with pytest.raises(CheckpointError) as caught:
        from_huggingface(config, state)
    return str(caught.value)


LAYER = "model.layers.1."


def test_import_lists_all_mismatches(mixtral):
    config, state = mixtral
    state[LAYER + "self_attn.query.weight"] = state.pop(LAYER + "self_attn.q_proj.weight")
    state[LAYER + "self_attn.q_proj.bias"] = np.zeros(24, np.float32)
    state["model.norm.weight"] = np.ones(35, np.float32)
    expert = LAYER + "block_sparse_moe.experts.4.w3.weight"
    state[expert] = state[expert].T
    codes = state["lm_head.weight"].astype(np.int8)
    state["lm_head.weight"] = codes
    bias = LAYER + "self_attn.q_proj.bias"
    query, wanted = LAYER + "self_attn.query.weight", LAYER + "self_attn.q_proj.weight"
    assert refused(config, state).splitlines() == [
        "the tensors are not those of the config (6 differ):",
        f"  {wanted}: missing, expected [24, 36] (near: {query}, {bias})",
        f"  {query}: found [24, 36], not in this model (near: {wanted})",
        f"  {bias}: found [24], not in this model (near: {wanted})",
        "  lm_head.weight: found int8, expected one of float16, bfloat16, float32, float64",
        f"  {expert}: found [36, 10], expected [10, 36]",
        "  model.norm.weight: found [35], expected [36]",
        "give the config.json that was saved with them",
    ]


def test_long_lists_of_mismatches_are_cut(mixtral):
    config, state = mixtral
    lines = refused(config, {"a": state["lm_head.weight"]}).splitlines()
    assert lines[0] == f"the tensors are not those of the config ({len(state) + 1} differ):"
    assert len(lines) == 23 and lines[-2] == "  ..."


def test_missing_expert_is_named(mixtral):
    config, state = mixtral
    del state["model.layers.0.block_sparse_moe.experts.3.w2.weight"]
    assert "experts.3.w2.weight: missing, expected [36, 10]" in refused(config, state)


def test_unexpected_experts_are_named(mixtral):
    """Reading only the first would give another model."""
    config, state = mixtral
    text = refused({**config, "num_local_experts": 4}, state)
    assert "(8 differ)" in text  # three matrices and one router in each of two layers
    assert "experts.4.w1.weight: found [10, 36], not in this model" in text
    assert "gate.weight: found [5, 36], expected [4, 36]" in text
    text = refused({**config, "num_local_experts": 4}, stacked(state))
    assert "gate_up_proj: found [5, 20, 36], expected [4, 20, 36]" in text


def test_both_layouts_at_once_are_refused(mixtral):
    config, state = mixtral
    both = {**stacked(state), **state}
    assert "mlp.experts.down_proj: found [5, 36, 10], not in this model" in refused(config, both)


def test_tied_head_is_checked(mixtral):
    config, state = mixtral
    tied = {**config, "tie_word_embeddings": True}
    text = "^tie_word_embeddings is set, but lm_head.weight is not model.embed_tokens.weight$"
    assert re.match(text, refused(tied, state))
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    twice = from_huggingface(tied, state)
    del state["lm_head.weight"]
    assert_same(from_huggingface(tied, state), twice)
    assert "lm_head.weight: missing, expected [26, 36]" in refused(config, state)


def test_import_without_tensors_is_refused(mixtral):
    with pytest.raises(CheckpointError, match="^from_huggingface needs tensors: give the model's "):
        from_huggingface(mixtral[0])


# Router state, and layers that nothing here computes.


def test_biases_are_router_state():
    golden = read("deepseek_v3")
    model, params, state = read_huggingface(golden.config, golden.state)
    name = "model.layers.2.mlp.gate.e_score_correction_bias"
    np.testing.assert_array_equal(state["bias"][1], golden.state[name])
    with pytest.raises(
        CheckpointError, match="which are router state and not param.*read_huggingf"
    ):
        from_huggingface(golden.config, golden.state)
    for layer in (1, 2):
        golden.state[f"model.layers.{layer}.mlp.gate.e_score_correction_bias"][:] = 0.0
    assert_same(from_huggingface(golden.config, golden.state), (model, params))
    del golden.state[name]
    assert f"{name}: missing, expected [6]" in refused(golden.config, golden.state)


def test_multi_token_prediction_layers_are_left_out_with_a_warning(caplog):
    golden = read("deepseek_v3")
    wanted = read_huggingface(golden.config, golden.state)
    more = {"model.layers.3.eh_proj.weight": np.zeros((36, 72), np.float32)}
    assert "eh_proj.weight: found [36, 72]" in refused(golden.config, golden.state | more)
    config = golden.config | {"num_nextn_predict_layers": 1}
    assert_same(read_huggingface(config, golden.state | more), wanted)
    assert caplog.messages == [
        "1 tensors of layers for multi-token prediction are left out,"
        " model.layers.3.eh_proj.weight first"
    ]
