# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Models of no family, exported with the modelling file, computed in PyTorch.

The comparisons need the extra `hf` (PyTorch 2.13.0 for the CPU, on Python 3.11).
"""

import ast
import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe import Transformer
from jaxmoe.checkpoint import CheckpointError, read_huggingface, to_huggingface
from jaxmoe.checkpoint.huggingface.modeling import MODELING
from jaxmoe.models.config import (
    AttentionConfig,
    ForwardMultipliers,
    LatentAttentionConfig,
    ModelConfig,
    MoEConfig,
)
from jaxmoe.models.transformer import initial_router_state
from jaxmoe.routing import (
    CapacityConfig,
    GroupLimitConfig,
    LossFreeConfig,
    RenormalizedGateConfig,
    SigmoidTopKConfig,
    SoftmaxGateConfig,
    SoftmaxTopKConfig,
    SqrtGateConfig,
)
from jaxmoe.routing.methods import METHODS
from jaxmoe.scaling.initialize import parameter_table
from tests.support.tolerances import assert_close

HYPERP = ModelConfig(
    vocab_size=23,
    num_layers=3,
    embed_dim=18,
    attention=AttentionConfig(num_heads=6, num_kv_heads=2, head_dim=4, is_gated=True),
    moe=MoEConfig(
        num_experts=5,
        top_k=3,
        expert_dim=7,
        num_shared_experts=2,
        router=SoftmaxTopKConfig(),
        gate=SqrtGateConfig(),
    ),
    dense_layers=(1,),
    dense_dim=11,
    norm_epsilon=1e-3,
    multipliers=ForwardMultipliers(
        embedding=1.5, residual=0.7, logits=0.4, router=0.8, attention_scale=0.3
    ),
)
BIASED = dataclasses.replace(
    HYPERP,
    attention=AttentionConfig(
        num_heads=2, num_kv_heads=1, head_dim=6, qk_norm="full", window=3, softcap=2.0
    ),
    moe=MoEConfig(
        num_experts=6,
        top_k=2,
        expert_dim=5,
        router=SigmoidTopKConfig(
            bias=LossFreeConfig(), groups=GroupLimitConfig(num_groups=3, top_groups=2)
        ),
        gate=RenormalizedGateConfig(scale=1.7),
        balancers=(),
    ),
    has_tied_embeddings=True,
    multipliers=ForwardMultipliers(),
)
PLAIN = dataclasses.replace(
    HYPERP,
    attention=AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=6, qk_norm="none"),
    moe=dataclasses.replace(
        HYPERP.moe,
        router=SoftmaxTopKConfig(softmax="after", bias=LossFreeConfig()),
        gate=SoftmaxGateConfig(scale=0.5),
        balancers=(),
    ),
    dense_layers=(),
)
UNIT = dataclasses.replace(PLAIN, attention=dataclasses.replace(PLAIN.attention, qk_norm="unit"))
MODELS = {"hyperp": HYPERP, "biased": BIASED, "plain": PLAIN, "unit": UNIT}


def _random(model):
    rng = np.random.default_rng(0)

    def value(row):
        size = 1.5 / row.declaration.fan(0) ** 0.5
        start = 1.0 if row.declaration.init == "ones" else 0.0
        return jnp.asarray(start + size * rng.standard_normal(row.shape) * 0.6, jnp.float32)

    state = jax.tree.map(
        lambda x: jnp.asarray(0.2 * rng.standard_normal(x.shape), jnp.float32),
        initial_router_state(model),
    )
    return parameter_table(model).tree(value), state


@pytest.mark.parametrize("name", MODELS)
def test_huggingface_modeling_round_trip(name, tmp_path):
    model = MODELS[name]
    params, state = _random(model)
    given = {"family": "jaxmoe", "router_state": state}
    place = to_huggingface(model, params, tmp_path / "it", **given)
    found = read_huggingface(place)
    assert found.model == model
    jax.tree.map(np.testing.assert_array_equal, found[1:], (params, state))
    config = json.loads((place / "config.json").read_text())
    assert config["model_type"] == "jaxmoe" and config["architectures"] == ["JaxmoeForCausalLM"]
    names = {node.name for node in ast.parse(MODELING).body if isinstance(node, ast.ClassDef)}
    assert {where.partition(".")[2] for where in config["auto_map"].values()} <= names
    assert (place / "modeling_jaxmoe.py").read_text() == MODELING


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", MODELS)
def test_modeling_file_computes_the_same_logits(name, tmp_path, monkeypatch):
    pytest.importorskip("transformers", reason="transformers is not installed: extra hf")
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: extra hf")
    import transformers

    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    model = MODELS[name]
    params, state = _random(model)
    given = {"family": "jaxmoe", "router_state": state, "max_shard_bytes": 9_000}
    place = to_huggingface(model, params, tmp_path / "it", **given)
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
        place, trust_remote_code=True, output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = np.random.default_rng(1).integers(23, size=(2, 9)).astype(np.int32)
    is_real = np.arange(9)[None, :] < np.array([[9], [6]])
    ids, mask = torch.tensor(tokens).long(), torch.tensor(is_real).long()
    with torch.no_grad():
        wanted = theirs.eval()(ids, attention_mask=mask).logits.numpy()
    ours = jax.jit(
        lambda p, t, s, i: Transformer(model).apply(
            {"params": p}, t, segment_ids=i, router_state=s or None
        )
    )(params, jnp.asarray(tokens), state, jnp.asarray(is_real, jnp.int32))
    assert_close(np.asarray(ours.logits)[is_real], wanted[is_real], "matmul")
    # The trainer that accumulates gradients divides by the tokens of all batches.
    mean = theirs(ids, labels=ids).loss.item()
    part = theirs(ids, labels=ids, num_items_in_batch=40).loss.item()
    assert_close(np.float32(part), np.float32(mean * 16 / 40), "matmul")
    written = theirs.generate(ids[:1, :4], max_new_tokens=3, do_sample=False)
    assert written.shape == (1, 7)
    theirs.save_pretrained(tmp_path / "again")
    found = read_huggingface(tmp_path / "again")
    assert found.model == model
    jax.tree.map(np.testing.assert_array_equal, found[1:], (params, state))


def test_export_error_names_the_modelling_file(tmp_path):
    with pytest.raises(CheckpointError) as caught:
        to_huggingface(HYPERP, {}, tmp_path / "it")
    assert "\n  model.moe.gate: sqrt here, softmax in qwen3_moe" in str(caught.value)
    last = str(caught.value).splitlines()[-1]
    assert last == (
        "family='jaxmoe' writes it with a modelling file of its own (modeling_jaxmoe.py)"
    )


def test_modeling_file_refuses_what_it_does_not_compute(tmp_path):
    def text(model, **given):
        with pytest.raises(CheckpointError) as caught:
            to_huggingface(model, {}, tmp_path / "it", family="jaxmoe", **given)
        return str(caught.value)

    latent = dataclasses.replace(HYPERP, attention=LatentAttentionConfig())
    moe = dataclasses.replace(
        HYPERP.moe, router=METHODS["bip"].router, capacity=CapacityConfig(), balancers=()
    )
    assert text(dataclasses.replace(latent, moe=moe)).splitlines() == [
        "modeling_jaxmoe.py does not compute all of this model:",
        "  model.attention=latent: only grouped_query",
        "  model.moe.router.bias=bip: only loss_free",
        "  model.moe.capacity: only None",
    ]
    moe = dataclasses.replace(HYPERP.moe, router=METHODS["hash"].router, balancers=())
    line = "model.moe.router=hash: only softmax_topk and sigmoid_topk"
    assert line in text(dataclasses.replace(HYPERP, moe=moe))
