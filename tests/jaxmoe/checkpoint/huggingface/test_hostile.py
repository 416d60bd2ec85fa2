# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Directories of `transformers` with hostile or damaged files: one row for each fault.

Every fault is one sentence of a CheckpointError, found before anything large is computed.
"""

import json
import os
import shutil

import numpy as np
import pytest

from jaxmoe import ModelConfig
from jaxmoe.checkpoint import CheckpointError, read_huggingface
from jaxmoe.checkpoint.huggingface import modeling
from jaxmoe.checkpoint.huggingface.files import INDEX
from jaxmoe.checkpoint.huggingface.tokenizer import read_tokenizer_files, separator_token
from tests.support.huggingface_models import CONFIGS, read, write_directory

CONFIG, FILE = "config.json", "model.safetensors"
DEEP = "[" * 100_000 + "]" * 100_000
HUGE = 10**400


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A model in one file, and the same in several files."""
    golden, place = read("mixtral"), tmp_path_factory.mktemp("models")
    write_directory(place / "one", golden.config, golden.state)
    write_directory(place / "shards", golden.config, golden.state, shard_bytes=30_000)
    return place


@pytest.fixture
def place(models, tmp_path):
    """A copy of the model in one file, which a test may change."""
    return shutil.copytree(models / "one", tmp_path / "model")


@pytest.fixture
def shards(models, tmp_path):
    """A copy of the model in several files, which a test may change."""
    return shutil.copytree(models / "shards", tmp_path / "model")


def refused(function, *arguments):
    """Return the message, which is one line of moderate length."""
    with pytest.raises(CheckpointError) as caught:
        function(*arguments)
    text = str(caught.value)
    assert "\n" not in text and len(text) < 1000, text
    return text


# Fields of config.json.

FIELDS = [
    ({"rope_scaling": "linear"}, "rope_scaling='linear' must be an object"),
    ({"rope_parameters": [1]}, "rope_parameters=[1] must be an object"),
    ({"rope_scaling": {"type": ["x"]}}, "rope_scaling.type=['x'] must be a string"),
    ({"rope_scaling": {"rope_theta": "1"}}, "rope_scaling.rope_theta='1' must be 0 or a number"),
    ({"model_type": ["mixtral"]}, "model_type=['mixtral'] must be a string"),
    ({"model_type": "m" * 10**6}, "model_type='mmmm"),
    ({"rms_norm_eps": "1e-5"}, "rms_norm_eps='1e-5' must be a finite number above 0"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan must be a finite number above 0"),
    ({"rms_norm_eps": HUGE}, "rms_norm_eps=1000"),
    ({"rope_theta": [1e4]}, "rope_theta=[10000.0] must be a finite number above 0"),
    ({"router_aux_loss_coef": "x"}, "router_aux_loss_coef='x' must be a finite number"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes' must be true or false"),
    ({"hidden_size": 36.5}, "hidden_size=36.5 must be an integer above 0"),
    ({"head_dim": "8"}, "head_dim='8' must be an integer above 0"),
    ({"num_key_value_heads": [1]}, "num_key_value_heads=[1] must be an integer above 0"),
    ({"num_experts_per_tok": True}, "num_experts_per_tok=True must be an integer above 0"),
    ({"sliding_window": {}}, "sliding_window={} must be an integer, 0 or more, and at most"),
    ({"max_position_embeddings": "4k"}, "max_position_embeddings='4k' must be an integer"),
    ({"bos_token_id": {"a": 1}}, "bos_token_id={'a': 1} must be a token id or a list of them"),
    (
        {"num_hidden_layers": 10**9},
        "num_hidden_layers=1000000000 must be an integer above 0 and at",
    ),
    ({"vocab_size": 10**12}, "vocab_size=1000000000000 must be an integer above 0 and at most"),
    ({"num_hidden_layers": 4000}, "num_hidden_layers=4000, and the tensors are of 2 layers: give"),
    (
        {"vocab_size": 10**9},
        "vocab_size=1000000000, and model.embed_tokens.weight is [26, 36]: give the config.json",
    ),
    ({"hidden_size": 3600}, "hidden_size=3600, and model.embed_tokens.weight is [26, 36]: give"),
    ({"head_dim": 10**9}, "head_dim=1000000000, and heads of at most 65536 are read: give the"),
    ({"num_local_experts": 10**5}, "num_local_experts=100000, and the tensors are of 5 experts"),
    (
        {"num_local_experts": 10**6, "num_hidden_layers": 4000},
        "num_local_experts=1000000, and 4000 layers of them exceed 1048576 experts",
    ),
]


@pytest.mark.parametrize(("changes", "text"), FIELDS)
def test_wrong_fields_are_one_sentence(place, changes, text):
    fields = json.loads((place / CONFIG).read_text())
    (place / CONFIG).write_text(json.dumps({**fields, **changes}))
    assert f"{place / CONFIG}: config.{text}" in refused(read_huggingface, place)


OTHER_FIELDS = [
    ("qwen3_moe", {"mlp_only_layers": "all"}, "mlp_only_layers='all' must be a list of layers"),
    ("qwen3_moe", {"mlp_only_layers": [[0]]}, "mlp_only_layers=[[0]] must be a list of layers"),
    ("qwen3_moe", {"decoder_sparse_step": "1"}, "decoder_sparse_step='1' must be an integer, 0"),
    ("deepseek_v3", {"first_k_dense_replace": "1"}, "first_k_dense_replace='1' must be an integer"),
    ("deepseek_v3", {"num_nextn_predict_layers": 10**9}, "num_nextn_predict_layers=1000000000 mus"),
    ("deepseek_v3", {"rope_scaling": {"beta_fast": 5e-324}}, "rope_scaling.beta_fast=5e-324 must"),
    ("deepseek_v3", {"routed_scaling_factor": None}, "the config has no routed_scaling_factor"),
    ("jamba", {"attn_layer_period": 0}, "attn_layer_period=0 must be an integer above 0"),
    ("jamba", {"expert_layer_offset": -1}, "expert_layer_offset=-1 must be an integer, 0 or more"),
    ("jamba", {"mamba_dt_rank": "all"}, "mamba_dt_rank='all' must be an integer above 0 or 'auto'"),
    ("jamba", {"mamba_expand": 1.5}, "mamba_expand=1.5 must be an integer above 0"),
    ("jamba", {"mamba_conv_bias": 1}, "mamba_conv_bias=1 must be true or false"),
    ("granitemoehybrid", {"layer_types": "mamba"}, "layer_types='mamba' must be a list of strings"),
    ("granitemoehybrid", {"logits_scaling": 0}, "logits_scaling=0 must be a finite number above 0"),
    ("granitemoehybrid", {"time_step_limit": 1}, "time_step_limit=1 must be a list of two numbers"),
    ("granitemoehybrid", {"position_embedding_type": 1}, "position_embedding_type=1 must be a str"),
    ("qwen2_moe", {"qkv_bias": 1}, "qkv_bias=1 must be true or false"),
    ("qwen2_moe", {"max_window_layers": -1}, "max_window_layers=-1 must be an integer, 0 or more"),
    ("qwen2_moe", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size=0 must"),
    ("gpt_oss", {"swiglu_limit": 0.0}, "swiglu_limit=0.0 must be a finite number above 0"),
    ("gpt_oss", {"attention_bias": "yes"}, "attention_bias='yes' must be true or false"),
    ("glm4_moe", {"use_qk_norm": 1}, "use_qk_norm=1 must be true or false"),
    ("ernie4_5_moe", {"moe_k": 0}, "moe_k=0 must be an integer above 0"),
    (
        "ernie4_5_moe",
        {"moe_layer_end_index": -2},
        "moe_layer_end_index=-2 must be an integer, -1 o",
    ),
    ("minimax_m2", {"rotary_dim": 6.5}, "rotary_dim=6.5 must be an integer above 0"),
    ("llama4_text", {"no_rope_layers": [True]}, "no_rope_layers=[True] must be a list of layers"),
    ("llama4_text", {"floor_scale": 0}, "floor_scale=0 must be an integer above 0"),
]


@pytest.mark.parametrize(("name", "changes", "text"), OTHER_FIELDS)
def test_wrong_fields_of_other_families_are_one_sentence(name, changes, text):
    assert text in refused(read_huggingface, {**CONFIGS[name], **changes}, {})


OWN = [
    (None, "config.jaxmoe of a model of type 'jaxmoe' cannot be read"),
    (
        {"num_layers": 10**9},
        "config.jaxmoe.num_layers=1000000000, and at most 4096 layers are read",
    ),
    ({"vocab_size": 10**12}, "config.jaxmoe.vocab_size=1000000000000 must be a finite number, and"),
    ({"norm_epsilon": HUGE}, "must be a finite number"),
    ({"attention": {"kind": ["x"]}}, "model of type 'jaxmoe' cannot be read"),
]


@pytest.mark.parametrize(("changes", "text"), OWN)
def test_wrong_models_of_own_modelling_file_are_one_sentence(changes, text):
    fields = {"model_type": "jaxmoe", **modeling.fields_of(ModelConfig())}
    fields["jaxmoe"] = None if changes is None else {**fields["jaxmoe"], **changes}
    state = {"model.embed_tokens.weight": np.zeros((2, 2), np.float32)}
    assert text in refused(read_huggingface, fields, state)


# JSON.

TEXTS = [
    (CONFIG, DEEP, "is not parsed (more than"),
    (CONFIG, '{"rope_scaling": ' + DEEP + "}", "or nested deeper than 64): download"),
    (CONFIG, '{"a": "' + '\\"' * 10**5, "is not JSON (Unterminated string"),
    (CONFIG, "[]", "holds a list, not a JSON object"),
    (CONFIG, '{"vocab_size": ' + "9" * 5000 + "}", "is not parsed (Exceeds the limit"),
    (CONFIG, " " * (1 << 24) + "{}", "bytes, at most 16777216 are allowed"),
    (INDEX, DEEP, "or nested deeper than 64): download"),
    (INDEX, "3", "holds an integer, not a JSON object"),
    (INDEX, '{"weight_map": null}', "weight_map is null and must map tensors to files"),
    (INDEX, '{"weight_map": ["model.safetensors"]}', "weight_map is a list and must map"),
    (INDEX, '{"weight_map": {}}', "weight_map is an empty object and must map"),
    (INDEX, '{"weight_map": {"a": null}}', "weight_map['a']=None must be the name of a file"),
    (INDEX, '{"weight_map": {"a": 3}}', "weight_map['a']=3 must be the name of a file"),
    (INDEX, '{"weight_map": {"a": ["b"]}}', "weight_map['a']=['b'] must be the name of a file"),
]


@pytest.mark.parametrize(("name", "content", "text"), TEXTS)
def test_wrong_json_is_one_sentence(place, name, content, text):
    (place / name).write_text(content)
    message = refused(read_huggingface, place)
    assert text in message and str(place / name) in message


def test_deep_tokenizer_json_is_one_sentence(place):
    (place / "tokenizer.json").write_text(DEEP)
    text = read_tokenizer_files(place)["tokenizer.json"]
    assert "tokenizer.json is not a tokenizer" in refused(separator_token, text, 0)


# Paths.

NAMES = ["../model/model.safetensors", "{outside}", "a/../../x", "", ".", "a\0b", "a\nb", "\ud800"]


@pytest.mark.parametrize("name", NAMES)
def test_index_names_stay_in_the_directory(shards, tmp_path, name):
    """Also where the file exists and holds the right tensors."""
    index = json.loads((shards / INDEX).read_text())
    outside = shutil.copy(shards / "model-00001-of-00003.safetensors", tmp_path)
    name = name.replace("{outside}", str(outside))
    names = {key: name if "00001" in old else old for key, old in index["weight_map"].items()}
    (shards / INDEX).write_text(json.dumps({"weight_map": names}))
    message = refused(read_huggingface, shards)
    assert f"{shards / INDEX} names the file " in message and "not inside" in message


@pytest.mark.parametrize("name", [CONFIG, INDEX, "model-00001-of-00003.safetensors"])
def test_links_out_of_the_directory_are_refused(shards, tmp_path, name):
    target = (shards / name).rename(tmp_path / "elsewhere")
    (shards / name).symlink_to(target)
    message = refused(read_huggingface, shards)
    assert f"{shards / name} is a link to {target}, outside {shards}: copy the file" in message


def test_single_file_that_is_a_link_out_of_the_directory_is_refused(place, tmp_path):
    """`model.safetensors` without an index, found by its suffix."""
    (place / FILE).rename(tmp_path / "elsewhere")
    (place / FILE).symlink_to(tmp_path / "elsewhere")
    assert "outside" in refused(read_huggingface, place)


def test_tokenizer_files_that_are_links_are_not_copied(place, tmp_path):
    """vocab.json -> a private file would be copied to the run."""
    (tmp_path / "secret").write_text("{}")
    (place / "tokenizer.json").write_text("{}")
    (place / "vocab.json").symlink_to(tmp_path / "secret")
    assert "outside" in refused(read_tokenizer_files, place)


def test_links_inside_the_directory_are_read(place):
    (place / FILE).rename(place / "weights.bin")
    (place / FILE).symlink_to("weights.bin")
    read_huggingface(place)


def hub_cache(model, root):
    """Move a model to the layout of the cache of huggingface_hub: links to blobs."""
    snapshot, blobs = root / "snapshots" / "0123abc", root / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(model.iterdir())):
        file.rename(blobs / f"{number:040x}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number:040x}")
    return snapshot


def test_links_of_the_hub_cache_are_read(shards, tmp_path):
    snapshot = hub_cache(shards, tmp_path / "models--a--b")
    read_huggingface(snapshot)
    (tmp_path / "link").symlink_to(snapshot)
    read_huggingface(tmp_path / "link")
    (snapshot / "part").mkdir()  # a subfolder of the same model
    for file in [path for path in snapshot.iterdir() if path.is_symlink()]:
        (snapshot / "part" / file.name).symlink_to(f"../{os.readlink(file)}")
    read_huggingface(snapshot / "part")
    (tmp_path / "models--a--b").rename(tmp_path / "other")
    assert "is a link to" in refused(read_huggingface, tmp_path / "other/snapshots/0123abc")


def test_links_of_the_hub_cache_lead_to_blobs_only(shards, tmp_path):
    """Neither to other models, nor through a link in the place of blobs."""
    snapshot = hub_cache(shards, tmp_path / "models--a--b")
    other = shutil.copytree(snapshot.parents[1] / "blobs", tmp_path / "models--c--d" / "blobs")
    (snapshot / CONFIG).unlink()
    (snapshot / CONFIG).symlink_to(other / f"{0:040x}")
    assert "is a link to" in refused(read_huggingface, snapshot)
    (snapshot / CONFIG).unlink()
    (snapshot / CONFIG).symlink_to(f"../../blobs/{0:040x}")
    shutil.rmtree(snapshot.parents[1] / "blobs")
    (snapshot.parents[1] / "blobs").symlink_to(other)
    assert "is a link to" in refused(read_huggingface, snapshot)


SPECIAL = {
    "fifo": (os.mkfifo, "a FIFO, socket or device, not a plain file"),
    "directory": (os.mkdir, "is a directory, not a plain file"),
    "loop": (lambda path: os.symlink(path, path), "Too many levels of symbolic links"),
    "dangling": (lambda path: os.symlink("none", path), "No such file or directory"),
    "device": (lambda path: os.symlink("/dev/zero", path), "is a link to /dev/zero, outside"),
}


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("name", [CONFIG, FILE])
def test_special_files_are_refused(place, kind, name):
    """Before they are opened, which hangs for a FIFO."""
    make, text = SPECIAL[kind]
    (place / name).unlink()
    make(place / name)
    assert text in refused(read_huggingface, place)
    given = (place / CONFIG, None) if name == CONFIG else (CONFIGS["mixtral"], place / FILE)
    refused(read_huggingface, *given)


# Values.

EXPERT = "model.layers.1.block_sparse_moe.experts.3.w1.weight"
GAIN = "model.norm.weight"


@pytest.mark.parametrize("name", [EXPERT, GAIN])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nonfinite_weights_are_refused_unless_kept(tmp_path, name, value):
    golden = read("mixtral")
    golden.state[name].flat[1] = value
    place = write_directory(tmp_path / "model", golden.config, golden.state)
    size = golden.state[name].size
    text = f"{place / FILE}: {name} holds 1 of {size} values that are NaN, infinite or too large"
    message = refused(read_huggingface, place)
    assert message.startswith(text) and "--imported.nonfinite keep" in message
    assert refused(read_huggingface, golden.config, golden.state).startswith(name)
    kept = read_huggingface(place, nonfinite="keep").params
    leaf = kept["final_norm"]["gain"] if name == GAIN else kept["moe_blocks_0"]["moe"]["experts"]
    leaves = [leaf] if name == GAIN else list(leaf.values())
    assert sum(int(np.sum(~np.isfinite(np.asarray(array)))) for array in leaves) == 1


def test_values_beyond_float32_are_refused():
    golden = read("mixtral")
    golden.state[GAIN] = golden.state[GAIN].astype(np.float64)
    golden.state[GAIN][0] = 1e300
    assert "too large for float32" in refused(read_huggingface, golden.config, golden.state)
