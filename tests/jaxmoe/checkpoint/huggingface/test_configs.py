# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Configs of transformers: published ones, names of versions 4 and 5, and errors."""

import dataclasses
import logging
import re

import pytest

from jaxmoe.checkpoint import from_huggingface
from jaxmoe.checkpoint.huggingface.families.own import family_of
from jaxmoe.checkpoint.huggingface.family import FAMILIES
from jaxmoe.checkpoint.huggingface.validation import check_fields
from jaxmoe.models.config import LatentAttentionConfig, YarnConfig
from jaxmoe.models.presets import PRESETS
from jaxmoe.routing import RenormalizedGateConfig
from jaxmoe.scaling.initialize import parameter_table
from tests.support.huggingface_models import CONFIGS

# Published, shortened by what changes nothing.

PUBLISHED = {
    "olmoe_1b_7b": {
        "model_type": "olmoe",
        "vocab_size": 50304,
        "hidden_size": 2048,
        "hidden_act": "silu",
        "intermediate_size": 1024,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "clip_qkv": None,
        "norm_topk_prob": False,
        "tie_word_embeddings": False,
        "router_aux_loss_coef": 0.01,
    },
    "mixtral_8x7b": {
        "model_type": "mixtral",
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "router_aux_loss_coef": 0.02,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    },
    "qwen3_30b_a3b": {
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "head_dim": 128,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 48,
        "router_aux_loss_coef": 0.001,
        "rope_scaling": None,
        "attention_bias": False,
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_the_presets(name, caplog):
    """All but the balance losses, which presets take from the papers."""
    config = PUBLISHED[name]
    model, preset = family_of(config).model(config), PRESETS[name]()
    coefficient = model.moe.balancers[0].coefficient
    wanted = config["router_aux_loss_coef"] * preset.moe.top_k / preset.num_layers
    assert coefficient == pytest.approx(wanted)
    moe = dataclasses.replace(model.moe, balancers=preset.moe.balancers)
    assert dataclasses.replace(model, moe=moe) == preset
    assert not caplog.records


TENSORS = {"olmoe_1b_7b": 3219, "mixtral_8x7b": 995, "qwen3_30b_a3b": 18_867}


@pytest.mark.parametrize(
    "name",
    ["olmoe_1b_7b", "mixtral_8x7b", pytest.param("qwen3_30b_a3b", marks=pytest.mark.large)],
)
def test_number_of_tensors_equals_published_models(name):
    """Norms, attention, router and three matrices for every expert of every layer."""
    text = f"the tensors are not those of the config ({TENSORS[name]} differ)"
    with pytest.raises(ValueError, match=re.escape(text)):
        from_huggingface(PUBLISHED[name], {})


def variant(name, **changes):
    config = {key: value for key, value in {**CONFIGS[name], **changes}.items() if value != ...}
    return FAMILIES[name]().model(config)


def test_fields_of_versions_4_and_5_are_read():
    for name in CONFIGS:
        wanted = variant(name)
        if "rope_type" in CONFIGS[name].get("rope_parameters", {}):  # not one by kind of layer
            rope = dict(CONFIGS[name]["rope_parameters"])
            kind = rope.pop("rope_type")
            names = {"rope_theta", "partial_rotary_factor"} & rope.keys()
            old = {field: rope.pop(field) for field in names}
            old["rope_scaling"] = {"type": kind, **rope} if rope else None
            assert variant(name, rope_parameters=..., **old) == wanted
        fields = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
        numbers = [CONFIGS[name][field] for field in fields if field in CONFIGS[name]]
        if not numbers:
            continue  # dbrx has its own names
        number = numbers[0]
        absent = dict.fromkeys(fields, ...)
        is_other = name in ("deepseek_v2", "ernie4_5_moe")
        alias = "num_experts" if is_other else "num_local_experts"
        assert variant(name, **absent | {alias: number}) == wanted
    defaults = {"olmoe": 1e4, "mixtral": 1e6, "qwen3_moe": 1e4, "deepseek_v3": 1e4}
    for name, theta in defaults.items():
        assert variant(name, rope_parameters=...).attention.rope_theta == theta


def test_optional_sizes_have_defaults():
    assert variant("olmoe").attention.head_dim == 12
    assert variant("mixtral", head_dim=None).attention.head_dim == 12
    assert variant("mixtral", num_key_value_heads=None).attention.num_kv_heads == 3


def test_published_fields_of_kimi_linear_are_read():
    """Layers are numbered from 1, sizes of linear layers have a record of their own."""
    expected = variant("kimi_linear")
    layers = {
        "kda_layers": [1, 3, 4],
        "full_attn_layers": [2],
        "head_dim": 8,
        "num_heads": 4,
        "short_conv_kernel_size": 3,
    }
    linear = dict.fromkeys(("linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim"), ...)
    names = {"num_experts_per_tok": ..., "num_experts_per_token": 2, "layer_types": ...}
    names |= {"n_group": ..., "num_expert_group": 3, "norm_topk_prob": ..., "moe_renormalize": True}
    assert variant("kimi_linear", linear_attn_config=layers, **linear, **names) == expected


def test_published_fields_of_ling_are_read():
    """Ling 3.0 as it is published, and Ling 2.5, which has the same model_type."""
    expected = variant("bailing_hybrid")
    fields = {"no_kda_lora": True, "linear_silu": True, "use_qk_norm": True, "group_norm_size": 1}
    fields |= {"gated_attention_proj_granularity_type": "head_wise", "score_function": "sigmoid"}
    fields |= {"rope_parameters": ..., "rope_theta": 40.0, "partial_rotary_factor": 0.5}
    fields |= {"num_kv_heads": ..., "moe_shared_expert_intermediate_size": 10, "n_group": 3}
    assert variant("bailing_hybrid", **fields) == expected
    older = {"model_type": "bailing_hybrid", "architectures": ["BailingMoeV2_5ForCausalLM"]}
    assert variant("bailing_moe_v2_5", **older) == variant("bailing_moe_v2_5")
    assert variant("bailing_moe_v2_5").attention.name == "latent"
    assert variant("bailing_hybrid").attention.name == "gated_latent"


def test_dense_layers_are_read():
    four = {"num_hidden_layers": 4, "mlp_only_layers": None}
    assert variant("qwen3_moe", **four, decoder_sparse_step=2).dense_layers == (0, 2)
    assert variant("qwen3_moe", **four, decoder_sparse_step=1).dense_layers == ()
    dense = variant("qwen3_moe", num_hidden_layers=2, mlp_only_layers=[0, 1])
    assert dense.moe is None and dense.dense_layers == ()
    assert variant("deepseek_v3", first_k_dense_replace=2).dense_layers == (0, 1)
    assert variant("deepseek_v3", first_k_dense_replace=0).dense_layers == ()
    assert variant("deepseek_v3", first_k_dense_replace=3).moe is None


@pytest.mark.parametrize("name", ["jamba", "granitemoehybrid"])
def test_fields_of_hybrids_describe_the_same_model(name):
    model, family = variant(name), FAMILIES[name]()
    assert family.model(family.fields(model)) == model
    attends = [not kind.mixer.is_recurrent for kind in model.kinds]
    assert attends == [False, True, False, False][: model.num_layers]


def test_layers_of_jamba_follow_its_periods():
    """Published: one attention in eight layers, experts in every second; one scan of eight."""
    eight = {"attn_layer_period": ..., "attn_layer_offset": ..., "expert_layer_offset": ...}
    model = variant("jamba", **eight, num_hidden_layers=32)
    assert [i for i, kind in enumerate(model.kinds) if not kind.mixer.is_recurrent] == [
        4,
        12,
        20,
        28,
    ]
    assert model.dense_layers == tuple(range(0, 32, 2)) and len(model.layers) == 8
    assert [scan.length for scan in model.scans] == [4]
    assert variant("jamba", mamba_dt_rank="auto").layers[0].mixer.step_rank == 3
    few = variant("jamba", **eight, num_hidden_layers=4)  # none of them attends
    assert all(kind.mixer.is_recurrent for kind in few.kinds)
    assert FAMILIES["jamba"]().model(FAMILIES["jamba"]().fields(few)) == few


def test_layer_types_of_granite_have_two_names():
    old = variant("granitemoehybrid")
    names = ["linear_attention", "full_attention", "linear_attention"]
    assert variant("granitemoehybrid", layer_types=names) == old
    assert variant("granitemoehybrid", layer_types=..., layers_block_type=names) == old
    assert all(
        kind.mixer.is_recurrent for kind in variant("granitemoehybrid", layer_types=None).kinds
    )
    limits = ([0.0, float("inf")], [0.0, {"__float__": "Infinity"}], None)
    assert all(variant("granitemoehybrid", time_step_limit=limit) == old for limit in limits)
    assert variant("granitemoehybrid", mamba_d_head="auto") == old
    assert old.attention.positions == "rotary"
    for kind in ("nope", None):
        model = variant("granitemoehybrid", position_embedding_type=kind)
        assert model.attention.positions == "none"


def test_defaults_are_those_of_transformers():
    """Fields that published configs leave out."""
    absent = variant("qwen2_moe", qkv_bias=..., max_window_layers=2, sliding_window=3)
    assert absent.attention.extras.has_bias
    assert [kind.mixer.window for kind in absent.kinds] == [3, None, None]
    plain = variant("qwen2_moe", use_sliding_window=False)
    assert {kind.mixer.window for kind in plain.kinds} == {None}
    absent = variant("gpt_oss", rope_parameters=..., head_dim=..., sliding_window=...)
    attention = absent.attention
    assert (attention.rope_theta, attention.head_dim, attention.window) == (150_000.0, 64, 128)
    stretch = {"factor": 32.0, "original_length": 4096, "mscale": None, "mscale_all_dim": None}
    assert attention.extras.rope_scaling == YarnConfig(**stretch, truncate=False)
    assert absent.kinds[1].mixer.window is None
    absent = variant("glm4_moe", rope_parameters=..., use_qk_norm=..., attention_bias=...)
    assert absent.attention.qk_norm == "none" and absent.attention.extras.rotary_dim == 4
    assert not absent.attention.extras.has_bias
    absent = variant("solar_open", rope_parameters=..., head_dim=...)
    assert (absent.attention.rope_theta, absent.attention.head_dim) == (1e6, 128)
    names = ("moe_num_shared_experts", "moe_layer_start_index", "moe_layer_end_index")
    absent = variant("ernie4_5_moe", **dict.fromkeys((*names, "tie_word_embeddings"), ...))
    assert absent.has_tied_embeddings and absent.dense_layers == (0,)
    assert absent.moe.num_shared_experts == 2
    published = variant("minimax_m2", rope_parameters=..., rope_theta=3.0)
    assert (published.attention.rope_theta, published.attention.extras.rotary_dim) == (3.0, 6)
    whole = variant("minimax_m2", rope_parameters=..., rotary_dim=..., head_dim=...)
    assert (whole.attention.rope_theta, whole.attention.head_dim) == (5e6, 128)
    assert whole.attention.options is None
    balanced = {"olmoe": 0.01, "flex_olmo": 0.01, "mixtral": 0.001, "jamba": 0.001, "phimoe": 0.001}
    for name, coefficient in balanced.items():
        absent = variant(name, router_aux_loss_coef=...)
        assert absent == variant(name, router_aux_loss_coef=coefficient)
        assert absent != variant(name, router_aux_loss_coef=0.0)
    assert variant("dots1", norm_topk_prob=...) == variant("dots1", norm_topk_prob=False)
    absent = variant("longcat_flash", rope_parameters=..., zero_expert_num=...)
    assert absent.attention.rope_theta == 1e7 and absent.moe.zero_computation.num_copy == 256


def test_yarn_fields_of_its_authors():
    """DeepSeek-V3's published config (version 4), and the same with names of version 5."""
    words = {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    }
    old = variant(
        "deepseek_v3",
        rope_parameters=...,
        rope_theta=10000,
        rope_scaling={"type": "yarn", **words},
    )
    assert old.attention.yarn == YarnConfig() and old.attention.rope_theta == 1e4
    new = {"rope_type": "yarn", "rope_theta": 10000.0, **words}
    assert variant("deepseek_v3", rope_parameters=new) == old
    assert FAMILIES["deepseek_v3"]().model(FAMILIES["deepseek_v3"]().fields(old)) == old


def test_deepseek_fields_of_its_authors():
    """The config of Moonlight-16B-A3B, of the same architecture: version 4, without YaRN."""
    config = {
        "model_type": "deepseek_v3",
        "vocab_size": 163840,
        "hidden_size": 2048,
        "intermediate_size": 11264,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 27,
        "num_nextn_predict_layers": 0,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "n_shared_experts": 2,
        "n_routed_experts": 64,
        "routed_scaling_factor": 2.446,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "qk_nope_head_dim": 128,
        "topk_method": "noaux_tc",
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 6,
        "moe_layer_freq": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "aux_loss_alpha": 0.001,
        "seq_aux": True,
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "ep_size": 1,
        "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
    }
    model = family_of(config).model(config)
    assert model.attention == LatentAttentionConfig(
        **{"num_heads": 16, "latent_dim": 512, "nope_dim": 128, "rope_dim": 64},
        **{"value_dim": 128, "rope_theta": 50000.0},
    )
    moe = model.moe
    assert (moe.num_experts, moe.top_k, moe.num_shared_experts) == (64, 6, 2)
    assert moe.gate == RenormalizedGateConfig(scale=2.446) and moe.router.groups is None
    assert model.dense_layers == (0,) and model.dense_dim == 11264
    assert parameter_table(model).total == pytest.approx(15.96e9, rel=1e-3)


def test_alpha_of_hunyuan_is_another_base():
    """In both spellings, with numbers for each layer as its authors write them."""
    config = CONFIGS["hunyuan_v1_moe"]
    scaling = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32, "mscale": 1.0}
    per_layer = {"moe_topk": [2, 2], "num_shared_expert": [1, 1], "moe_intermediate_size": [10, 10]}
    old = {"rope_theta": 40.0, "rope_scaling": scaling} | per_layer
    old |= {name: config[name] for name in config if name not in ("rope_parameters", *old)}
    del old["num_experts_per_tok"]
    new = config | {"rope_parameters": scaling | {"rope_type": "dynamic", "rope_theta": 40.0}}
    wanted = FAMILIES["hunyuan_v1_moe"]().model(new)
    assert wanted.attention.rope_theta == pytest.approx(40.0 * 1000.0 ** (8 / 6))
    check_fields(old)
    assert FAMILIES["hunyuan_v1_moe"]().model(old) == wanted


def test_deepseek_v3_has_671_billion_parameters():
    """The sizes of its config.json; 37 billion of them are active (arXiv 2412.19437, abstract)."""
    config = {
        "model_type": "deepseek_v3",
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_nextn_predict_layers": 1,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "n_shared_experts": 1,
        "n_routed_experts": 256,
        "routed_scaling_factor": 2.5,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "qk_nope_head_dim": 128,
        "n_group": 8,
        "topk_group": 4,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "rms_norm_eps": 1e-6,
        "norm_topk_prob": True,
    }
    table = parameter_table(family_of(config).model(config))
    assert table.total == pytest.approx(671.03e9, rel=1e-4)
    assert table.active(8, 256) == pytest.approx(37.5e9, rel=0.01)


def test_attention_windows_are_read():
    assert variant("mixtral").attention.window == 4
    assert variant("mixtral", sliding_window=None).attention.window is None
    assert variant("qwen3_moe", sliding_window=3).attention.window is None
    windowed = variant("qwen3_moe", sliding_window=3, use_sliding_window=True)
    assert windowed.attention.window == 3


YARN = {"rope_type": "yarn", "factor": 4.0}
REFUSED = [
    ("olmoe", {"model_type": "llama"}, "config.model_type='llama' is not among olmoe, mixtral, qw"),
    ("olmoe", {"model_type": "qwen3"}, "did you mean 'qwen3_moe'?"),
    ("mixtral", {"clip_qkv": 8.0}, "config.clip_qkv=8.0 is not supported, only None: queries, ke"),
    ("mixtral", {"hidden_act": "gelu"}, "config.hidden_act='gelu' is not supported, only 'silu'"),
    ("mixtral", {"attention_bias": True}, "config.attention_bias=True is not supported, only Fal"),
    (
        "qwen3_moe",
        {"rope_scaling": YARN},
        "YaRN here needs factor, original_max_position_embe",
    ),
    (
        "qwen3_moe",
        {
            "rope_parameters": YARN | {"original_max_position_embeddings": 8},
            "rope_scaling": {"type": "default"},
        },
        "config.rope_scaling and config.rope_parameters differ",
    ),
    (
        "mixtral",
        {"rope_parameters": {"full": {}}},
        "'llama3', the same in all layers",
    ),
    ("mixtral", {"rope_theta": 5.0}, "the config has several rope_theta: [5.0, 300.0]"),
    ("mixtral", {"num_experts": 6}, "the config has num_local_experts=5 and num_experts=6, two "),
    (
        "olmoe",
        {"num_experts": ..., "num_expert": 5},
        "no num_local_experts or num_experts: did you",
    ),
    ("olmoe", {"hidden_size": 36.5}, "config.hidden_size=36.5 must be an integer above 0"),
    ("olmoe", {"sliding_window": 5}, "config.sliding_window=5 is not supported, only None"),
    (
        "olmoe",
        {"num_attention_heads": 5},
        "hidden_size=36 does not divide by num_attention_heads=5",
    ),
    ("mixtral", {"head_dim": 9}, "attention.head_dim=9 must be even"),
    ("mixtral", {"router_jitter_noise": 0.1}, "config.router_jitter_noise=0.1 is not supported"),
    ("deepseek_v3", {"scoring_func": "softmax"}, "config.scoring_func='softmax' is not supported"),
    ("deepseek_v3", {"topk_method": "greedy"}, "these experts are chosen with a bias"),
    ("deepseek_v3", {"num_key_value_heads": 1}, "every head has keys of its own, from the latent"),
    ("deepseek_v3", {"q_lora_rank": ...}, "the config has no q_lora_rank: did you mean 'kv_lora_r"),
    ("deepseek_v3", {"rope_scaling": YARN}, "YaRN here needs factor, original_max_position_embe"),
    (
        "deepseek_v3",
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        "of type 'default' or 'yarn', the same in all layers",
    ),
    ("deepseek_v3", {"n_shared_experts": 0}, "n_shared_experts=0 must be an integer above 0"),
    ("deepseek_v3", {"n_group": 6}, "groups.best_per_group=2 must not exceed the 1 experts of a"),
    (
        "jamba",
        {"attn_layer_offset": 3},
        "attn_layer_offset=3 must be below config.attn_layer_period=3",
    ),
    ("jamba", {"mamba_inner_layernorms": False}, "mamba_inner_layernorms=False is not supported"),
    ("jamba", {"sliding_window": 4}, "sliding_window=4 is not supported, only None: Jamba attends"),
    (
        "granitemoehybrid",
        {"shared_intermediate_size": 15},
        "shared_intermediate_size=15 must be a multiple of intermediate_size=10: shared experts",
    ),
    (
        "granitemoehybrid",
        {"time_step_limit": [0.0, 0.1]},
        "time_step_limit=[0.0, 0.1] is not supported, only [0, infinity]: steps are not bounded",
    ),
    (
        "granitemoehybrid",
        {"position_embedding_type": "alibi"},
        "position_embedding_type='alibi' is not supported, only 'rope' and 'nope' (or null)",
    ),
    (
        "granitemoehybrid",
        {"layer_types": ["mamba", "moe", "mamba"]},
        "layer_types=['mamba', 'moe', 'mamba'] must name 3 layers (num_hidden_layers), each of",
    ),
    (
        "granitemoehybrid",
        {"mamba_d_head": 8},
        "mamba_n_heads=6 heads of mamba_d_head=8 must be mamba_expand * hidden_size = 72 channels",
    ),
    ("granitemoehybrid", {"attention_bias": True}, "attention_bias=True is not supported, only F"),
    (
        "hunyuan_v1_moe",
        {"moe_topk": [2, 3]},
        "config.moe_topk=[2, 3] is not supported: all layers here have equal experts",
    ),
    ("exaone_moe", {"sliding_window": None}, "config.sliding_window=null is not supported, only"),
    (
        "exaone_moe",
        {"layer_types": None, "sliding_window_pattern": "LLLG"},
        "sliding_window_pattern='LLLG' is not supported without layer_types, only an integer",
    ),
    (
        "dbrx",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10.0}},
        "the config has several rope_theta: [10.0, 35.0]",
    ),
    ("dbrx", {"hidden_size": 40}, "the config has d_model=36 and hidden_size=40, two names of one"),
    (
        "dbrx",
        {"ffn_config": {"moe_normalize_expert_weights": 2.0}},
        "moe_normalize_expert_weights=2.0 is not supported, only 1.0: gates are divided",
    ),
    ("dbrx", {"attn_config": {"kv_n_heads": 1.5}}, "config.attn_config.kv_n_heads=1.5 must be"),
    ("hunyuan_v1_moe", {"use_cla": True}, "config.use_cla=True is not supported, only False"),
    (
        "gpt_oss",
        {"sliding_window": 0},
        "config.sliding_window is absent, and layers of layer_types",
    ),
    ("gpt_oss", {"layer_types": ["chunked_attention"] * 2}, "must name 2 layers (num_hidden_layer"),
    ("solar_open", {"first_k_dense_replace": 1}, "every layer of Solar Open has experts"),
    ("mixtral", {"partial_rotary_factor": 0.5}, "0.5 is not supported, only 1.0: RoPE of this fam"),
    ("solar_open", {"use_qk_norm": True}, "use_qk_norm=True is not supported, only False: queries"),
    ("ernie4_5_moe", {"use_bias": True}, "use_bias=True is not supported, only False: feed-forwar"),
    ("ernie4_5_moe", {"moe_norm_min": 0.1}, "moe_norm_min=0.1 is not supported, only 1e-12: gates"),
    ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func='softmax' is not supported"),
    ("minimax_m2", {"sliding_window": 4}, "MiniMax-M2 attends to all earlier tokens"),
    (
        "nemotron_h",
        {"layers_block_type": None, "hybrid_override_pattern": "M-EM*M-"},
        "layer 2 of M-EM*M- is a feed-forward without a mixer before it",
    ),
    (
        "nemotron_h",
        {"layers_block_type": ["conv"] * 7},
        "must name 7 layers (num_hidden_layers), ",
    ),
    (
        "nemotron_h",
        {"num_hidden_layers": 6},
        "must name 6 layers (num_hidden_layers), each of ",
    ),
    (
        "nemotron_h",
        {"moe_latent_size": 8},
        "moe_latent_size=8 is not supported, only None: ",
    ),
    ("nemotron_h", {"mlp_bias": True}, "mlp_bias=True is not supported, only False"),
    (
        "nemotron_h",
        {"mlp_hidden_act": "silu"},
        "mlp_hidden_act='silu' is not supported, only",
    ),
    ("nemotron_h", {"time_step_limit": [0.1, 1.0]}, "time_step_limit=[0.1, 1.0] is not supported"),
    (
        "cohere2_moe",
        {"shared_expert_combination_strategy": "product"},
        "shared_expert_combination_strategy='product' is neither 'sum' nor 'average'",
    ),
    (
        "phimoe",
        {"rope_parameters": {"rope_type": "longrope", "short_mscale": 1.2}},
        "of type 'longrope' with short_mscale and long_mscale",
    ),
    ("lfm2_moe", {"layer_types": ["conv"]}, "layer_types=['conv'] must name 4 layers"),
    ("qwen3_next", {"attention_bias": True}, "attention_bias=True is not supported, only False"),
    ("kimi_linear", {"mla_use_nope": False}, "mla_use_nope=False is not supported, only True"),
    ("kimi_linear", {"tie_word_embeddings": True}, "tie_word_embeddings=True is not supported"),
    ("bailing_moe", {"score_function": "softmax"}, "score_function='softmax' is not supported"),
    ("bailing_moe", {"n_group": ...}, "the config has no n_group"),
    ("bailing_moe", {"norm_head": True}, "norm_head=True is not supported, only False"),
    ("bailing_moe_v2_5", {"linear_silu": True}, "linear_silu=True is not supported, only False"),
    (
        "bailing_moe_v2_5",
        {"rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8}},
        "config.rope_scaling is not supported, only null: lightning",
    ),
    ("bailing_moe_v2_5", {"qk_rope_head_dim": 6}, "partial_rotary_factor=0.5 is not supported"),
    ("bailing_hybrid", {"no_kda_lora": False}, "no_kda_lora=False is not supported, only True"),
    ("bailing_hybrid", {"use_mla_nope": True}, "use_mla_nope=True is not supported, only False"),
    ("bailing_hybrid", {"tie_word_embeddings": True}, "tie_word_embeddings=True is not supported"),
    ("jetmoe", {"num_attention_heads": 4}, "num_attention_heads=4 is not supported, only 6"),
    ("jetmoe", {"activation_function": "gelu"}, "hidden_act='gelu' is not supported, only 'silu'"),
    (
        "minimax",
        {"full_attn_alpha_factor": 2.0},
        "full_attn_alpha_factor=2.0 and config.linear_attn_alpha_factor=1.3 differ, and",
    ),
]


@pytest.mark.parametrize(("name", "changes", "text"), REFUSED)
def test_unsupported_configs_are_refused(name, changes, text):
    config = {key: value for key, value in {**CONFIGS[name], **changes}.items() if value != ...}
    with pytest.raises(ValueError, match=re.escape(text)):
        from_huggingface(config, {})


def test_unknown_fields_are_named(caplog):
    with caplog.at_level(logging.WARNING):
        variant("olmoe", logit_soft_cap=30.0, use_cache=True)
    assert caplog.messages == ["config fields unknown to jaxmoe, ignored: logit_soft_cap"]
