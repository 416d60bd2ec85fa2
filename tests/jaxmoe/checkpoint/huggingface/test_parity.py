# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Parity with `transformers`: logits, balance loss, gradients, in every layout that it writes.

Needs the extra `hf` (PyTorch 2.13.0 for the CPU, on Python 3.11); the golden arrays that these
models leave behind are compared in test_huggingface.py without it. To write them anew:

    pytest -m slow --regenerate-golden tests/jaxmoe/checkpoint/huggingface/test_parity.py
"""

import copy
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe import Transformer, generate
from jaxmoe.checkpoint import from_huggingface, read_huggingface, to_huggingface
from jaxmoe.routing.balancers import conversions, load_balance, pool_layers
from tests.support import huggingface_models
from tests.support.huggingface_models import (
    BALANCED,
    CONFIGS,
    Golden,
    balance_coefficient,
    build,
    family_options,
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
VARIANTS = {
    **{name: (name, {}) for name in CONFIGS},
    "olmoe renormalised": (
        "olmoe",
        {"norm_topk_prob": True, "intermediate_size": 20, "num_key_value_heads": 3},
    ),
    "mixtral, no window, tied": (
        "mixtral",
        {"sliding_window": None, "tie_word_embeddings": True, "intermediate_size": 20},
    ),
    "qwen3, every second layer, windows": (
        "qwen3_moe",
        {
            "mlp_only_layers": [],
            "decoder_sparse_step": 2,
            "num_hidden_layers": 4,
            "use_sliding_window": True,
            "sliding_window": 3,
            "norm_topk_prob": False,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "tie_word_embeddings": False,
        },
    ),
    "deepseek, one group, queries without latent, halves": (
        "deepseek_v3",
        {
            "n_group": 1,
            "topk_group": 1,
            "q_lora_rank": None,
            "rope_interleave": False,
            "norm_topk_prob": False,
            "first_k_dense_replace": 0,
            "n_routed_experts": 5,
            "v_head_dim": 11,
            "tie_word_embeddings": True,
            "num_hidden_layers": 2,
        },
    ),
    "deepseek, yarn": (
        "deepseek_v3",
        {
            "qk_rope_head_dim": 10,
            "num_hidden_layers": 2,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 40.0,
                "factor": 12.0,
                "mscale": 0.7,
                "mscale_all_dim": 1.3,
                "original_max_position_embeddings": 16,
                "beta_fast": 3.0,
                "beta_slow": 0.2,
            },
        },
    ),
    "jamba, dense, no biases, one period": (
        "jamba",
        {
            "num_experts": 1,
            "expert_layer_period": 1,
            "expert_layer_offset": 0,
            "attn_layer_period": 2,
            "attn_layer_offset": 0,
            "tie_word_embeddings": True,
            "mamba_conv_bias": False,
            "mamba_proj_bias": False,
            "mamba_d_conv": 4,
        },
    ),
    "granite, no positions, biases, all types": (
        "granitemoehybrid",
        {
            "position_embedding_type": None,
            "mamba_proj_bias": True,
            "mamba_n_groups": 1,
            "mamba_conv_bias": False,
            "num_hidden_layers": 4,
            "mamba_chunk_size": 256,
            "layer_types": ["linear_attention", "linear_attention", "full_attention", "mamba"],
            "shared_intermediate_size": 10,
            "tie_word_embeddings": True,
        },
    ),
    "granite, dense": (
        "granitemoehybrid",
        {"num_local_experts": 0, "mamba_n_heads": 3, "mamba_d_head": 24, "mamba_n_groups": 3},
    ),
    "granitemoeshared, no shared expert, biases, yarn": (
        "granitemoeshared",
        {
            "shared_intermediate_size": 0,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 40.0,
                "factor": 3.0,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "granitemoeshared, as wide as two experts, biases, linear rope": (
        "granitemoeshared",
        {
            "shared_intermediate_size": 20,
            "attention_bias": True,
            "num_key_value_heads": 3,
            "num_hidden_layers": 3,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 30.0, "factor": 1.7},
        },
    ),
    "hunyuan_v1_moe, another base for alpha, no biases, tied": (
        "hunyuan_v1_moe",
        {
            "rope_parameters": {
                "rope_type": "dynamic",
                "rope_theta": 20.0,
                "alpha": 7.0,
                "factor": 1.0,
            },
            "attention_bias": False,
            "tie_word_embeddings": True,
            "num_experts_per_tok": [3, 3],
            "intermediate_size": 14,
        },
    ),
    "hunyuan_v1_moe, dynamic rope, no shared heads": (
        "hunyuan_v1_moe",
        {
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 50.0, "factor": 2.0},
            "num_key_value_heads": 3,
            "head_dim": 12,
            "num_hidden_layers": 3,
            "max_position_embeddings": 6,
        },
    ),
    "exaone_moe, a pattern, one group, no dense layer": (
        "exaone_moe",
        {
            "layer_types": None,
            "mlp_layer_types": None,
            "first_k_dense_replace": 0,
            "sliding_window_pattern": 2,
            "num_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "tie_word_embeddings": True,
        },
    ),
    "exaone_moe, windows alone, llama3": (
        "exaone_moe",
        {
            "layer_types": ["sliding_attention"] * 4,
            "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"],
            "num_key_value_heads": 3,
            "max_position_embeddings": 24,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 45.0,
                "factor": 3.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 3.0,
                "original_max_position_embeddings": 8,
            },
        },
    ),
    "dbrx, gates as they are, dynamic rope": (
        "dbrx",
        {
            "attn_config": {"kv_n_heads": 3, "rope_theta": 25.0, "clip_qkv": 0.75},
            "ffn_config": {
                "ffn_hidden_size": 14,
                "moe_num_experts": 6,
                "moe_top_k": 3,
                "moe_normalize_expert_weights": None,
            },
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 25.0, "factor": 2.5},
            "max_seq_len": 7,
        },
    ),
    "dbrx, three layers": ("dbrx", {"n_layers": 3, "n_heads": 9, "vocab_size": 22}),
    "lfm2_moe, no biases, one period": (
        "lfm2_moe",
        {
            "conv_bias": False,
            "use_expert_bias": False,
            "norm_topk_prob": False,
            "num_dense_layers": 0,
            "layer_types": ["full_attention", "conv"] * 2,
            "conv_L_cache": 3,
            "tie_word_embeddings": True,
        },
    ),
    "lfm2_moe, dense, heads of queries in groups": (
        "lfm2_moe",
        {
            "num_dense_layers": 3,
            "num_hidden_layers": 3,
            "layer_types": ["conv", "conv", "full_attention"],
            "hidden_size": 32,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 11,
        },
    ),
    "qwen3_next, one key head, wider RoPE, tied": (
        "qwen3_next",
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 25.0,
                "partial_rotary_factor": 0.75,
            },
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 3,
            "shared_expert_intermediate_size": 20,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
            "tie_word_embeddings": True,
            "layer_types": ["linear_attention"] * 2 + ["full_attention"],
        },
    ),
    "qwen3_next, every second layer, whole heads turn": (
        "qwen3_next",
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 35.0,
                "partial_rotary_factor": 1.0,
            },
            "num_hidden_layers": 4,
            "layer_types": None,
            "mlp_only_layers": [],
            "decoder_sparse_step": 2,
            "linear_num_value_heads": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        },
    ),
    "qwen3_5_moe_text, one head of keys for each of values": (
        "qwen3_5_moe_text",
        {
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 3,
            "linear_conv_kernel_dim": 4,
            "tie_word_embeddings": True,
            "num_key_value_heads": 3,
        },
    ),
    "qwen3_5_moe_text, periods": (
        "qwen3_5_moe_text",
        {
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "shared_expert_intermediate_size": 10,
            "num_experts": 7,
            "head_dim": 16,
        },
    ),
    "flex_olmo, renormalised, no biases, yarn, tied": (
        "flex_olmo",
        {
            "norm_topk_prob": True,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 30.0,
                "factor": 4.0,
                "original_max_position_embeddings": 12,
                "attention_factor": 0.9,
                "truncate": False,
            },
        },
    ),
    "flex_olmo, heads of their own": (
        "flex_olmo",
        {"num_key_value_heads": 3, "num_hidden_layers": 3, "num_experts_per_tok": 3},
    ),
    "afmoe, a pattern, no muP, no dense layer": (
        "afmoe",
        {
            "layer_types": None,
            "global_attn_every_n_layers": 2,
            "num_dense_layers": 0,
            "mup_enabled": False,
            "attention_bias": False,
            "tie_word_embeddings": True,
        },
    ),
    "afmoe, windows alone, linear rope": (
        "afmoe",
        {
            "layer_types": ["sliding_attention"] * 4,
            "num_dense_layers": 2,
            "num_shared_experts": 1,
            "num_key_value_heads": 3,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 30.0, "factor": 1.8},
        },
    ),
    "phimoe, longrope, no biases": (
        "phimoe",
        {
            "attention_bias": False,
            "router_jitter_noise": 0.05,
            "num_key_value_heads": 3,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 30.0,
                "short_factor": [1.1, 1.3, 1.7, 2.2],
                "long_factor": [1.2, 2.5, 3.5, 5.0],
                "short_mscale": 1.2,
                "long_mscale": 1.2,
                "factor": 3.0,
                "original_max_position_embeddings": 12,
            },
        },
    ),
    "phimoe, window, three layers, tied": (
        "phimoe",
        {"sliding_window": 4, "num_hidden_layers": 3, "tie_word_embeddings": True},
    ),
    "cohere2_moe, patterns, softmax, no biases, tied": (
        "cohere2_moe",
        {
            "layer_types": None,
            "mlp_layer_types": None,
            "first_k_dense_replace": 2,
            "prefix_dense_sliding_window_pattern": 2,
            "sliding_window_pattern": 2,
            "num_shared_experts": 0,
            "shared_expert_combination_strategy": "average",
            "expert_selection_fn": "softmax",
            "attention_bias": False,
            "tie_word_embeddings": True,
            "prefix_dense_intermediate_size": None,
        },
    ),
    "cohere2_moe, RMSNorm, bare sigmoid, no dense layer": (
        "cohere2_moe",
        {
            "rms_norm_eps": 1e-3,
            "norm_topk_prob": False,
            "mlp_layer_types": ["sparse"] * 4,
            "num_shared_experts": 1,
            "num_key_value_heads": 3,
        },
    ),
}


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


DELTA = ("qwen3_next", "qwen3_5_moe_text")


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_equal_transformers(name, torch):
    """Gradients of the loss with balance: router, attention and experts of the first layer."""
    theirs, tokens = build(CONFIGS[name]), tokens_of(CONFIGS[name])
    ids, is_balanced = torch.tensor(tokens).long(), name in BALANCED
    asked = {"output_router_logits": True} if is_balanced else {}
    loss = theirs(ids, labels=ids, **asked).loss
    loss.backward()
    gradients = {
        key: p.grad.numpy() if p.requires_grad else p for key, p in theirs.named_parameters()
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
    # These norm few features: transformers is as far from itself in float64.
    assert_close(ours, wanted, "other_length" if name in ("jamba", *DELTA) else "end_to_end")


@pytest.mark.parametrize("name", CONFIGS)
def test_golden_arrays_equal_transformers(name, torch, tmp_path, request):
    from safetensors.numpy import load_file

    theirs, tokens = build(CONFIGS[name]), tokens_of(CONFIGS[name])
    logits, balance = outputs_of(theirs, tokens)
    theirs.save_pretrained(tmp_path)
    live = Golden(
        config=CONFIGS[name],
        state=load_file(tmp_path / "model.safetensors"),
        tokens=tokens,
        logits=logits,
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
    given |= family_options({"model_type": theirs.config.model_type})
    if theirs.config.model_type == "qwen3_moe":
        given["max_shard_bytes"] = 20_000
    place = to_huggingface(found.model, params, tmp_path / "it", **given)
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
    "lfm2_moe",
    "qwen3_next",
    "qwen3_5_moe_text",
    "afmoe",
    "cohere2_moe",
)


@pytest.mark.parametrize("name", GENERATING)
def test_greedy_tokens_equal_those_of_transformers(name, torch):
    """Two prompts, each continued from a cache of states, keys and values; both by argmax."""
    theirs, prompts = build(CONFIGS[name]), tokens_of(CONFIGS[name])[:, :5]
    model, params, state = read_huggingface(theirs.config.to_dict(), theirs.state_dict())
    found = generate(
        model,
        params,
        jnp.asarray(prompts),
        num_tokens=8,
        key=jax.random.key(0),
        temperature=0.0,
        router_state=state or None,
    )
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
