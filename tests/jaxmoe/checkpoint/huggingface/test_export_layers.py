# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Models with `model.layers`, written for transformers in their short form or refused."""

import dataclasses
import json
import operator
import re

import jax
import numpy as np
import pytest

from jaxmoe.checkpoint import CheckpointError, read_huggingface, to_huggingface
from jaxmoe.checkpoint.huggingface.export import suggest_family
from jaxmoe.checkpoint.huggingface.family import FAMILIES
from jaxmoe.layers.mixers import Mamba2Config, MambaConfig
from jaxmoe.models.config import (
    AttentionConfig,
    DenseConfig,
    ForwardMultipliers,
    LayerConfig,
    ModelConfig,
    MoEConfig,
)
from jaxmoe.routing import SoftmaxTopKConfig
from jaxmoe.scaling.initialize import init_params
from tests.support.huggingface_models import read


def spelled_out(model, *first):
    """Return the model with `layers`, its period given by the first ones."""
    layers = [
        LayerConfig(mixer=kind.mixer, feed_forward=kind.feed_forward)
        for kind in first or model.kinds
    ]
    return dataclasses.replace(model, layers=tuple(layers), dense_layers=(), dense_dim=1)


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3"])
def test_layers_that_spell_out_a_family_give_the_same_files(name, tmp_path):
    """Equal layers, and dense ones first; transformers reads these files in test_parity.py."""
    golden = read(name)
    model, params, state = read_huggingface(golden.config, golden.state)
    short = to_huggingface(model, params, tmp_path / "short", router_state=state)
    model = spelled_out(model)
    assert suggest_family(model) == (golden.config["model_type"], "")
    long = to_huggingface(model, params, tmp_path / "long", router_state=state)
    assert {path.name: path.read_bytes() for path in long.iterdir()} == {
        path.name: path.read_bytes() for path in short.iterdir()
    }


def test_export_of_a_repeating_period_numbers_its_layers(tmp_path):
    """Experts and dense in turn: stacked as a cycle here, as four stacks when read back."""
    model = dataclasses.replace(read_huggingface(*read("qwen3_moe")[:2]).model, num_layers=4)
    model = spelled_out(model, *model.kinds[:2])
    params = init_params(model, jax.random.key(0))
    found = read_huggingface(to_huggingface(model, params, tmp_path / "it"))
    assert found.model.dense_layers == (1, 3) and not found.model.layers
    for layer, stack in enumerate(found.model.stacks):
        repeat, place = divmod(layer, 2)
        wanted = jax.tree.map(
            operator.itemgetter(slice(repeat, repeat + 1)), params["cycle_0"][str(place)]
        )
        jax.tree.map(np.testing.assert_array_equal, found.params[stack.path], wanted)


@pytest.mark.parametrize(
    ("layer", "text"),
    [
        (
            LayerConfig(mixer=AttentionConfig(qk_norm="full", softcap=3.0)),
            r"layer 1 of model.layers has another mixer \(grouped_query\) than layer 0"
            r" \(grouped_query\), and no family of transformers has two: softcap 3.0, null",
        ),
        (
            LayerConfig(feed_forward=DenseConfig(hidden_dim=12)),
            "layer 3 of model.layers has a dense feed-forward of 24 and layer 1 one of 12, and no",
        ),
    ],
    ids=["mixer", "dense width"],
)
def test_export_names_the_layer_that_no_family_has(layer, text, tmp_path):
    dense = LayerConfig(feed_forward=DenseConfig(hidden_dim=24))
    model = ModelConfig(
        attention=AttentionConfig(qk_norm="full"),
        layers=(LayerConfig(), layer, LayerConfig(), dense),
    )
    for family in (None, "jaxmoe"):
        with pytest.raises(CheckpointError, match=text):
            to_huggingface(model, {}, tmp_path / "it", family=family)
    with pytest.raises(CheckpointError, match=text):
        suggest_family(model)


@pytest.mark.parametrize("name", ["jamba", "granitemoehybrid"])
def test_hybrids_that_spell_out_their_layers_give_the_same_files(name, tmp_path):
    golden = read(name)
    model, params, _ = read_huggingface(golden.config, golden.state)
    short = to_huggingface(model, params, tmp_path / "short")
    model = spelled_out(model)
    assert suggest_family(model) == (name, "")
    long = to_huggingface(model, params, tmp_path / "long")
    assert {path.name: path.read_bytes() for path in long.iterdir()} == {
        path.name: path.read_bytes() for path in short.iterdir()
    }


def test_export_of_a_repeating_period_of_mixers(tmp_path):
    """Stacked as a cycle here; read back, equal layers in the same places of it."""
    model = dataclasses.replace(read_huggingface(*read("jamba")[:2]).model, num_layers=6)
    model = spelled_out(model, *model.kinds[:3])
    params = init_params(model, jax.random.key(0))
    found = read_huggingface(to_huggingface(model, params, tmp_path / "it"))
    assert found.model.kinds == model.kinds and len(found.model.layers) == 3
    jax.tree.map(np.testing.assert_array_equal, found.params, params)


ATTENTION = AttentionConfig(qk_norm="none", positions="none")
MAMBA = MambaConfig(inner_norms="rms")
HYBRIDS = {
    "norms": (
        {"mixer": MambaConfig()},
        {},
        'model.layers.0.mixer.inner_norms: "none" here, "rms" in jamba',
    ),
    "positions": (
        {"mixer": MAMBA},
        {"attention": AttentionConfig(qk_norm="none")},
        'model.attention.positions: "rotary" here, "none" in jamba',
    ),
    "channels": ({"mixer": MambaConfig(inner_dim=250)}, {}, "layers of model.layers have 250 chan"),
    "residual": (
        {"mixer": MAMBA},
        {"multipliers": ForwardMultipliers(residual=0.5)},
        "model.multipliers.residual: 0.5 here, 1.0 in jamba",
    ),
    "softmax": (
        {"mixer": Mamba2Config(head_dim=32)},
        {"moe": MoEConfig(router=SoftmaxTopKConfig(softmax="before"), num_shared_experts=1)},
        'model.moe.router.softmax: "before" here, "after" in granitemoehybrid',
    ),
}


@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrids_that_a_family_does_not_compute_are_refused(name, tmp_path):
    layer, changes, text = HYBRIDS[name]
    given = {"attention": ATTENTION, "layers": (LayerConfig(**layer), LayerConfig())}
    model = ModelConfig(**{**given, **changes})
    with pytest.raises(CheckpointError, match=re.escape(text)):
        to_huggingface(model, {}, tmp_path / "it")


def test_layers_of_experts_without_a_period_are_refused(tmp_path):
    given = {"attention": ATTENTION, "layers": (LayerConfig(mixer=MAMBA), LayerConfig())}
    text = (
        r"layers \[2, 3\] of model.layers and model.dense_layers have experts, and jamba of trans"
    )
    with pytest.raises(CheckpointError, match=text):
        to_huggingface(ModelConfig(**given, dense_layers=(0, 1)), {}, tmp_path / "it")


@pytest.mark.parametrize("width", [24, 32, 10])
@pytest.mark.parametrize("num_experts", [0, 2])
def test_a_model_without_recurrent_layers_is_exported_as_its_hybrid_family(
    num_experts, width, tmp_path
):
    """As granite-4.0-micro, -1b and -350m: attention in all layers, dense or with experts."""
    config = dict(read("granitemoehybrid").config)
    config |= {
        "hidden_size": width,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "num_hidden_layers": 2,
        "layer_types": ["attention"] * 2,
        "position_embedding_type": "rope",
        "num_local_experts": num_experts,
        "intermediate_size": 12,
        "shared_intermediate_size": 24,
        "mamba_n_heads": 2,
        "mamba_d_head": width,
        "mamba_expand": 2,
        "embedding_multiplier": 12.0,
        "logits_scaling": 6.0,
    }
    model = FAMILIES["granitemoehybrid"]().model(config)
    params = init_params(model, jax.random.key(0))
    assert suggest_family(model) == ("granitemoehybrid", "")
    for family in (None, "granitemoehybrid"):
        place = to_huggingface(model, params, tmp_path / str(family), family=family)
        fields = json.loads((place / "config.json").read_text())
        heads = fields["mamba_n_heads"] * fields["mamba_d_head"]
        assert heads == fields["mamba_expand"] * width
        found = read_huggingface(place)
        jax.tree.map(np.testing.assert_array_equal, found.params, params)
