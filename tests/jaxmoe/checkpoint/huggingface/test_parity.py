# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Parity with `transformers`: logits, balance loss, gradients, in every layout that it writes.

Needs the extra `hf` (PyTorch 2.13.0 for the CPU, on Python 3.11); the golden arrays that these
models leave behind are compared in test_huggingface.py without it. To write them anew:

    pytest -m slow --regenerate-golden tests/jaxmoe/checkpoint/huggingface/test_parity.py
"""

import copy
import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe import Transformer, generate
from jaxmoe.checkpoint import from_huggingface, read_huggingface, to_huggingface
from jaxmoe.checkpoint.huggingface.files import Planned, write_tensors
from jaxmoe.routing.balancers import conversions, load_balance, pool_layers
from tests.support import huggingface_models, huggingface_variants
from tests.support.huggingface_models import (
    BALANCED,
    CONFIGS,
    IN_FLOAT64,
    Golden,
    balance_coefficient,
    build,
    outputs_of,
    tokens_of,
)
from tests.support.tolerances import assert_close

pytestmark = [
    pytest.mark.slow,
    # PyTorch and transformers warn about their own use.
    pytest.mark.filterwarnings("default"),
]

# Variants of the golden cases, larger and otherwise set.
VARIANTS = {**{name: (name, {}) for name in CONFIGS}, **huggingface_variants.VARIANTS}


@pytest.fixture(scope="module")
def torch():
    pytest.importorskip("transformers", reason="transformers is not installed: extra hf")
    return pytest.importorskip("torch", reason="PyTorch is not installed: extra hf")


@pytest.fixture(params=VARIANTS)
def case(request, torch):
    """The model of transformers, and tokens."""
    name, changes = VARIANTS[request.param]
    config = copy.deepcopy({**CONFIGS[name], **changes})
    return build(config), tokens_of(config)


def apply(model, params, tokens, router_state=None):
    def run(params, tokens, state):
        return Transformer(model).apply({"params": params}, tokens, router_state=state)

    return jax.jit(run)(params, tokens, router_state)


def balance_of(model, statistics):
    """The loss of jaxmoe in the unit of transformers."""
    value = float(load_balance(pool_layers(statistics)))
    return conversions(value, top_k=model.moe.top_k)["huggingface"]


def test_logits_and_balance_loss(case, torch):
    theirs, tokens = case
    logits, balance = outputs_of(theirs, tokens)
    model, params, state = read_huggingface(theirs.config.to_dict(), theirs.state_dict())
    ours = apply(model, params, jnp.asarray(tokens), state or None)
    assert_close(ours.logits, logits, "matmul")
    if theirs.config.model_type in BALANCED and model.moe is not None:
        assert_close(balance_of(model, ours.statistics), balance, "matmul")


def test_modeling_file_with_padding(torch):
    """Rows of different length: padding is neither attended to, nor routed, nor counted."""
    theirs, tokens = build(CONFIGS["olmoe"]), tokens_of(CONFIGS["olmoe"])
    is_real = np.arange(tokens.shape[1])[None, :] < np.array([[9], [5]])
    mask = torch.tensor(is_real).long()
    with torch.no_grad():
        wanted = theirs(torch.tensor(tokens).long(), mask, output_router_logits=True)
    model, params = from_huggingface(theirs.config.to_dict(), theirs.state_dict())
    ours = Transformer(model).apply(
        {"params": params}, jnp.asarray(tokens), segment_ids=jnp.asarray(is_real, jnp.int32)
    )
    assert_close(ours.logits[is_real], wanted.logits.numpy()[is_real], "matmul")
    assert_close(balance_of(model, ours.statistics), float(wanted.aux_loss), "matmul")


def test_modeling_file_saves_what_it_loads(case, torch, tmp_path, caplog):
    """On disk every expert has its own tensors, and Mixtral has other names."""
    theirs, _ = case
    wanted = read_huggingface(theirs.config.to_dict(), theirs.state_dict())
    theirs.save_pretrained(tmp_path / "whole")
    theirs.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    for place in ("whole", "shards"):
        found = read_huggingface(tmp_path / place)
        assert found.model == wanted.model
        jax.tree.map(np.testing.assert_array_equal, found[1:], wanted[1:])
    # Every field that it writes is known here.
    assert not [record for record in caplog.records if record.name.startswith("jaxmoe")]


def test_modeling_file_in_bfloat16(torch):
    theirs = build(CONFIGS["olmoe"]).to(torch.bfloat16)
    _, params = from_huggingface(theirs.config.to_dict(), theirs.state_dict())
    wanted = theirs.state_dict()["model.layers.1.self_attn.o_proj.weight"].float().numpy().T
    np.testing.assert_array_equal(
        params["moe_blocks_0"]["attention"]["o"][1].reshape(36, 36), wanted
    )


NORMED = (
    "jamba",
    "qwen3_next",
    "qwen3_5_moe_text",
    "minimax",
    "kimi_linear",
    "bailing_hybrid",
    "bailing_moe_v2_5",
)


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_equal_transformers(name, torch):
    """Gradients of the loss with balance: router, attention and experts of the first layer."""
    theirs, tokens = build(CONFIGS[name]), tokens_of(CONFIGS[name])
    ids, is_balanced = torch.tensor(tokens).long(), name in BALANCED
    asked = {"output_router_logits": True} if is_balanced else {}
    loss = theirs(ids, labels=ids, **asked).loss
    loss.backward()
    gradients = {
        key: p.grad.numpy() if p.grad is not None else torch.zeros_like(p)  # of an indexer
        for key, p in theirs.named_parameters()
    }
    gradients |= {key: x for key, x in theirs.named_buffers() if key.endswith("_bias")}
    if theirs.config.tie_word_embeddings:
        gradients["lm_head.weight"] = gradients["model.embed_tokens.weight"]
    wanted = read_huggingface(theirs.config.to_dict(), gradients).params
    model, params, state = read_huggingface(theirs.config.to_dict(), theirs.state_dict())
    coefficient = (balance_coefficient(CONFIGS[name]) or 0.0) * model.moe.top_k

    def loss_of(params, tokens):
        output = Transformer(model).apply({"params": params}, tokens, router_state=state or None)
        log_probs = jax.nn.log_softmax(output.logits[:, :-1])
        chosen = jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=-1)
        return coefficient * load_balance(pool_layers(output.statistics)) - chosen.mean()

    value, ours = jax.jit(jax.value_and_grad(loss_of))(params, jnp.asarray(tokens))
    assert_close(value, loss.detach().numpy(), "matmul")
    # These norm few features, the queries of Llama 4 grow: transformers is about as far from
    # itself in float64.
    is_sharp = name in ("llama4_text", *NORMED)
    assert_close(ours, wanted, "other_length" if is_sharp else "end_to_end")


@pytest.mark.parametrize("name", CONFIGS)
def test_golden_arrays_equal_transformers(name, torch, tmp_path, request):
    from safetensors.numpy import load_file

    theirs, tokens = build(CONFIGS[name]), tokens_of(CONFIGS[name])
    theirs.save_pretrained(tmp_path)
    logits, balance = outputs_of(theirs.double() if name in IN_FLOAT64 else theirs, tokens)
    live = Golden(
        config=CONFIGS[name],
        state=load_file(tmp_path / "model.safetensors"),
        tokens=tokens,
        logits=logits.astype(np.float32),
        balance=balance,
    )
    if request.config.getoption("--regenerate-golden"):
        huggingface_models.write(name, live)
    golden = huggingface_models.read(name)
    assert golden.config == live.config
    assert golden.state.keys() == live.state.keys()
    rest = {"config": {}} if name in BALANCED else {"config": {}, "balance": 0.0}
    assert_close(golden._replace(**rest), live._replace(**rest), "matmul")


@pytest.mark.parametrize("experts", ["each", "stacked"])
def test_transformers_reads_exported_files(case, torch, tmp_path, experts):
    """Random parameters of ours, with which their model computes the same logits: in one file and
    in several, a tensor for each expert and for all."""
    import transformers

    theirs, tokens = case
    found = read_huggingface(theirs.config.to_dict(), theirs.state_dict())
    params = jax.tree.map(lambda x: x * 0.75 + 0.05, found.params)
    state = jax.tree.map(lambda x: x * 0.5, found.router_state)
    ours = apply(found.model, params, jnp.asarray(tokens), state or None)
    given = {"router_state": state, "experts": experts, "max_length": 64}
    given["family"] = theirs.config.model_type  # some variants are also those of other families
    if theirs.config.model_type == "qwen3_moe":
        given["max_shard_bytes"] = 20_000
    place = to_huggingface(found.model, params, tmp_path / "it", **given)
    fields = json.loads((place / "config.json").read_text())
    if fields["model_type"] != theirs.config.model_type:  # Ling 2.5 has that of Ling 3.0
        assert theirs.config.model_type == "bailing_moe_v2_5"
        fields["model_type"] = "bailing_moe_v2_5"
        (place / "config.json").write_text(json.dumps(fields))
    is_cut = len(list(place.glob("*.safetensors"))) > 1
    assert is_cut == (theirs.config.model_type == "qwen3_moe")
    read, info = transformers.AutoModelForCausalLM.from_pretrained(
        place,
        output_loading_info=True,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(read) is type(theirs) and read.dtype == torch.float32
    logits, _ = outputs_of(read.eval(), tokens)
    assert_close(logits, ours.logits, "matmul")
    # And what it saves of that is what we wrote.
    read.save_pretrained(tmp_path / "again")
    again = read_huggingface(tmp_path / "again")
    assert dataclasses.replace(again.model, moe=None, dense_layers=()) == dataclasses.replace(
        found.model, moe=None, dense_layers=()
    )
    jax.tree.map(np.testing.assert_array_equal, again[1:], (params, state))


def test_balance_loss_of_transformers_over_layers(torch):
    """One layer: K times ours. Several: K times ours of all their tokens, which is no function of
    the layers' own losses."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    from jaxmoe.routing.base import sum_statistics

    rng = np.random.default_rng(3)
    layers = rng.normal(size=(3, 24, 6)) + rng.normal(size=(3, 1, 6)) * 2.0

    def statistics_of(logits):
        _, ids = jax.lax.top_k(logits, 2)
        mask, probs = jnp.ones(24, bool), jax.nn.softmax(logits, axis=-1)
        return sum_statistics(logits, probs, ids.reshape(-1).astype(jnp.int32), mask)

    statistics = jax.jit(jax.vmap(statistics_of))(jnp.asarray(layers, jnp.float32))
    for chosen in ([0], [0, 1, 2]):
        gates = tuple(torch.tensor(layers[i]) for i in chosen)
        theirs = float(load_balancing_loss_func(gates, 6, 2))
        ours = jax.tree.map(lambda leaf, rows=chosen: leaf[np.asarray(rows)], statistics)
        assert_close(2.0 * load_balance(pool_layers(ours)), theirs, "matmul")
    assert abs(2.0 * load_balance(statistics).mean() - theirs) > 0.1


GENERATING = (
    "jamba",
    "granitemoehybrid",
    "exaone_moe",
    "afmoe",
    "cohere2_moe",
    "lfm2_moe",
    "qwen3_next",
    "qwen3_5_moe_text",
    "qwen2_moe",
    "gpt_oss",
    "glm4_moe",
    "ernie4_5_moe",
    "llama4_text",
    "minimax",
    "nemotron_h",
    "kimi_linear",
    "bailing_moe",
    "bailing_moe_v2_5",
    "bailing_hybrid",
    "jetmoe",
    "longcat_flash",
    "mimo_v2_flash",
    "deepseek_v32",
)


@pytest.mark.parametrize("name", GENERATING)
def test_greedy_tokens_equal_those_of_transformers(name, torch):
    """Two prompts, each continued from a cache of states, keys and values; both by argmax."""
    theirs, prompts = build(CONFIGS[name]), tokens_of(CONFIGS[name])[:, :5]
    model, params, state = read_huggingface(theirs.config.to_dict(), theirs.state_dict())
    greedy = {"num_tokens": 8, "key": jax.random.key(0), "temperature": 0.0}
    found = generate(model, params, jnp.asarray(prompts), router_state=state or None, **greedy)
    given = torch.tensor(prompts).long()
    wanted = theirs.generate(
        given,
        attention_mask=torch.ones_like(given),
        **{"do_sample": False, "max_new_tokens": 8, "pad_token_id": 0},
    )
    np.testing.assert_array_equal(found, wanted.numpy()[:, 5:])
    assert len(np.unique(found)) > 3


def test_mxfp4_directory_has_the_values_of_transformers(torch, tmp_path):
    """gpt-oss as it is published: blocks of 32 values with a power of two each."""
    import transformers

    config = {**CONFIGS["gpt_oss"], "hidden_size": 64, "intermediate_size": 32}
    state = {name: tensor.numpy() for name, tensor in build(config).state_dict().items()}
    rng = np.random.default_rng(4)
    for name in [name for name in state if name.endswith(("experts.gate_up_proj", ".down_proj"))]:
        experts, fan_in, out = state.pop(name).shape
        shape = (experts, out, fan_in // 32, 16)
        state[f"{name}_blocks"] = rng.integers(256, size=shape).astype(np.uint8)
        state[f"{name}_scales"] = rng.integers(121, 127, size=shape[:-1]).astype(np.uint8)
    assert sum(name.endswith("_blocks") for name in state) == 4
    planned = {name: Planned(value.shape, value.dtype.name) for name, value in state.items()}
    write_tensors(tmp_path, planned, state.__getitem__, max_shard_bytes=1 << 30)
    settings = {"quantization_config": {"quant_method": "mxfp4"}, "dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(config | settings))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path,
        attn_implementation="eager",
        experts_implementation="eager",
        quantization_config=transformers.Mxfp4Config(dequantize=True),
    )
    assert theirs.dtype == torch.float32
    found = read_huggingface(tmp_path)
    wanted = read_huggingface(config, theirs.state_dict())
    assert found.model == wanted.model
    jax.tree.map(np.testing.assert_array_equal, found.params, wanted.params)
    tokens = tokens_of(config)
    logits, _ = outputs_of(theirs.eval(), tokens)
    assert_close(apply(found.model, found.params, jnp.asarray(tokens)).logits, logits, "matmul")
