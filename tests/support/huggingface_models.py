# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Tiny models of `transformers`: their configs, their golden arrays, and the models themselves.

No two widths are equal or powers of two, and none is what it would be by default. Every parameter
is random, gains included, of a size at which RoPE, norms and gates matter, and exact in float16, as
which the golden files hold it.

`transformers` and PyTorch are imported by `build` alone. To add a case: a row in CONFIGS, and
`pytest -m slow --regenerate-golden tests/jaxmoe/checkpoint/huggingface/test_parity.py`.
"""

import json
import pathlib
import re
from typing import Any, NamedTuple

import numpy as np

from jaxmoe.checkpoint.huggingface.files import Planned, write_tensors

GOLDEN = pathlib.Path(__file__).resolve().parents[1] / "golden" / "huggingface"
BATCH, LENGTH = 2, 9

_SIZES = {
    "vocab_size": 26,
    "hidden_size": 36,
    "intermediate_size": 10,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-3,
    "hidden_act": "silu",
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def _rope(theta: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}


_PARTIAL_ROPE = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 55.0,
        "partial_rotary_factor": 0.25,
    }
}
_DELTA = {
    "num_experts": 5,
    "moe_intermediate_size": 10,
    "shared_expert_intermediate_size": 11,
    "head_dim": 8,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_value_head_dim": 6,
    "linear_key_head_dim": 5,
    "linear_conv_kernel_dim": 3,
}


CONFIGS: dict[str, dict[str, Any]] = {
    "olmoe": {
        **_SIZES,
        **_rope(70.0),
        "model_type": "olmoe",
        "num_experts": 5,
        "norm_topk_prob": False,
        "router_aux_loss_coef": 0.3,
    },
    "mixtral": {
        **_SIZES,
        **_rope(300.0),
        "model_type": "mixtral",
        "num_local_experts": 5,
        "head_dim": 8,  # not 36 / 3
        "sliding_window": 4,
        "router_aux_loss_coef": 0.2,
    },
    "qwen3_moe": {
        **_SIZES,
        **_rope(50.0),
        "model_type": "qwen3_moe",
        "num_hidden_layers": 3,
        "num_local_experts": 5,
        "moe_intermediate_size": 10,
        "intermediate_size": 14,
        "mlp_only_layers": [1],
        "head_dim": 8,
        "norm_topk_prob": True,
        "tie_word_embeddings": True,
        "router_aux_loss_coef": 0.1,
    },
    "deepseek_v3": {
        **_SIZES,
        **_rope(40.0),
        "model_type": "deepseek_v3",
        "num_hidden_layers": 3,
        "num_key_value_heads": 3,
        "n_routed_experts": 6,
        "n_shared_experts": 2,
        "moe_intermediate_size": 10,
        "intermediate_size": 14,
        "first_k_dense_replace": 1,
        "n_group": 3,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.7,
        "kv_lora_rank": 7,
        "q_lora_rank": 9,
        "qk_nope_head_dim": 5,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "rope_interleave": True,
        "num_nextn_predict_layers": 0,
    },
    "jamba": {
        **_SIZES,
        "model_type": "jamba",
        "num_hidden_layers": 4,
        "num_experts": 8,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "mamba_d_state": 10,
        "mamba_d_conv": 3,
        "mamba_expand": 2,
        "mamba_dt_rank": 9,
        "mamba_conv_bias": True,
        "mamba_proj_bias": True,
        "router_aux_loss_coef": 0.2,
    },
    "granitemoehybrid": {
        **_SIZES,
        **_rope(60.0),
        "model_type": "granitemoehybrid",
        "num_hidden_layers": 3,
        "num_local_experts": 5,
        "shared_intermediate_size": 20,
        "layer_types": ["mamba", "attention", "mamba"],
        "position_embedding_type": "rope",
        "mamba_n_heads": 6,
        "mamba_d_head": 12,
        "mamba_n_groups": 2,
        "mamba_d_state": 7,
        "mamba_d_conv": 3,
        "mamba_expand": 2,
        "mamba_chunk_size": 4,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "embedding_multiplier": 1.5,
        "residual_multiplier": 0.7,
        "logits_scaling": 3.0,
        "attention_multiplier": 0.2,
        "router_aux_loss_coef": 0.1,
    },
    "dots1": {
        **_SIZES,
        **_rope(90.0),
        "model_type": "dots1",
        "num_hidden_layers": 4,
        "n_routed_experts": 6,
        "n_shared_experts": 2,
        "moe_intermediate_size": 10,
        "intermediate_size": 14,
        "first_k_dense_replace": 1,
        "n_group": 3,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.3,
        "head_dim": 8,
        "sliding_window": 4,
        "layer_types": [
            "sliding_attention",
            "full_attention",
            "sliding_attention",
            "full_attention",
        ],
    },
    "granitemoe": {
        **_SIZES,
        **_rope(80.0),
        "model_type": "granitemoe",
        "num_local_experts": 5,
        "embedding_multiplier": 1.5,
        "residual_multiplier": 0.7,
        "logits_scaling": 3.0,
        "attention_multiplier": 0.2,
        "router_aux_loss_coef": 0.1,
    },
    "deepseek_v2": {
        **_SIZES,
        **_rope(40.0),
        "model_type": "deepseek_v2",
        "num_hidden_layers": 3,
        "num_key_value_heads": 3,
        "n_routed_experts": 6,
        "n_shared_experts": 2,
        "moe_intermediate_size": 10,
        "intermediate_size": 14,
        "first_k_dense_replace": 1,
        "topk_method": "group_limited_greedy",
        "n_group": 3,
        "topk_group": 2,
        "routed_scaling_factor": 1.7,
        "kv_lora_rank": 8,  # transformers views these as complex numbers
        "q_lora_rank": 9,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
    },
    "glm4_moe_lite": {
        **_SIZES,
        **_rope(40.0),
        "model_type": "glm4_moe_lite",
        "num_hidden_layers": 3,
        "num_key_value_heads": 3,
        "n_routed_experts": 6,
        "n_shared_experts": 1,
        "moe_intermediate_size": 10,
        "intermediate_size": 14,
        "mlp_layer_types": ["sparse", "dense", "sparse"],
        "n_group": 2,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.7,
        "kv_lora_rank": 7,
        "q_lora_rank": None,
        "qk_nope_head_dim": 5,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "rope_interleave": True,
    },
    "granitemoeshared": {
        **_SIZES,
        **_rope(65.0),
        "model_type": "granitemoeshared",
        "num_local_experts": 5,
        "shared_intermediate_size": 14,
        "embedding_multiplier": 1.5,
        "residual_multiplier": 0.7,
        "logits_scaling": 3.0,
        "attention_multiplier": 0.2,
        "router_aux_loss_coef": 0.1,
    },
    "hunyuan_v1_moe": {
        **_SIZES,
        **_rope(75.0),
        "model_type": "hunyuan_v1_moe",
        "num_experts": 5,
        "head_dim": 8,
        "attention_bias": True,
    },
    "exaone_moe": {
        **_SIZES,
        **_rope(55.0),
        "model_type": "exaone_moe",
        "num_hidden_layers": 4,
        "num_experts": 6,
        "num_shared_experts": 2,
        "moe_intermediate_size": 10,
        "intermediate_size": 14,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "n_group": 3,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.6,
        "head_dim": 8,
        "sliding_window": 3,
        "layer_types": [
            "sliding_attention",
            "full_attention",
            "full_attention",
            "sliding_attention",
        ],
    },
    "dbrx": {
        **_rope(35.0),
        "model_type": "dbrx",
        "vocab_size": 26,
        "d_model": 36,
        "n_heads": 3,
        "n_layers": 2,
        "attn_config": {
            "attn_pdrop": 0.0,
            "clip_qkv": 1.25,
            "kv_n_heads": 1,
            "rope_theta": 35.0,
        },
        "ffn_config": {
            "hidden_size": 36,
            "ffn_act_fn": {"name": "silu"},
            "ffn_hidden_size": 10,
            "moe_num_experts": 5,
            "moe_top_k": 2,
            "moe_jitter_eps": 0.0,
            "moe_loss_weight": 0.25,
            "moe_normalize_expert_weights": 1.0,
        },
    },
    "lfm2_moe": {
        **{name: size for name, size in _SIZES.items() if name != "rms_norm_eps"},
        **_rope(45.0),
        "model_type": "lfm2_moe",
        "norm_eps": 1e-3,
        "num_hidden_layers": 4,
        "num_experts": 5,
        "moe_intermediate_size": 10,
        "intermediate_size": 14,
        "num_dense_layers": 1,
        "layer_types": ["conv", "full_attention", "conv", "conv"],
        "conv_L_cache": 4,
        "conv_bias": True,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.4,
        "tie_word_embeddings": False,
    },
    "qwen3_next": {
        **_SIZES,
        **_PARTIAL_ROPE,
        **_DELTA,
        "model_type": "qwen3_next",
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "intermediate_size": 14,
        "mlp_only_layers": [2],
        "norm_topk_prob": False,
        "router_aux_loss_coef": 0.2,
    },
    "qwen3_5_moe_text": {
        **{name: size for name, size in _SIZES.items() if name != "intermediate_size"},
        **_PARTIAL_ROPE,
        **_DELTA,
        "model_type": "qwen3_5_moe_text",
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "linear_attention", "linear_attention"],
        "router_aux_loss_coef": 0.3,
    },
    "flex_olmo": {
        **_SIZES,
        **_rope(85.0),
        "model_type": "flex_olmo",
        "num_experts": 5,
        "norm_topk_prob": False,
        "attention_bias": True,
        "router_aux_loss_coef": 0.2,
    },
    "afmoe": {
        **_SIZES,
        **_rope(45.0),
        "model_type": "afmoe",
        "num_hidden_layers": 4,
        "num_experts": 6,
        "num_shared_experts": 2,
        "moe_intermediate_size": 10,
        "intermediate_size": 14,
        "num_dense_layers": 1,
        "route_scale": 1.4,
        "mup_enabled": True,
        "attention_bias": True,
        "head_dim": 8,
        "sliding_window": 3,
        "layer_types": [
            "full_attention",
            "sliding_attention",
            "sliding_attention",
            "full_attention",
        ],
    },
    "phimoe": {
        **_SIZES,
        **_rope(33.0),
        "model_type": "phimoe",
        "num_local_experts": 5,
        "head_dim": 8,
        "attention_bias": True,
        "router_jitter_noise": 0.2,
        "router_aux_loss_coef": 0.15,
        "lm_head_bias": False,
        "sliding_window": None,
    },
    "cohere2_moe": {
        **{name: value for name, value in _SIZES.items() if name != "rms_norm_eps"},
        "rope_theta": 15.0,
        "layer_norm_eps": 2e-3,
        "model_type": "cohere2_moe",
        "num_hidden_layers": 4,
        "num_experts": 6,
        "num_shared_experts": 2,
        "shared_expert_combination_strategy": "sum",
        "expert_selection_fn": "sigmoid",
        "norm_topk_prob": True,
        "prefix_dense_intermediate_size": 14,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "logit_scale": 0.3,
        "tie_word_embeddings": False,
        "attention_bias": True,
        "head_dim": 8,
        "sliding_window": 3,
        "layer_types": [
            "full_attention",
            "sliding_attention",
            "full_attention",
            "sliding_attention",
        ],
    },
}


def balance_coefficient(config: dict[str, Any]) -> float | None:
    """The coefficient of the load-balancing loss; None if the family has none."""
    parts = config | config.get("ffn_config", {})
    return parts.get("router_aux_loss_coef", parts.get("moe_loss_weight"))


BALANCED = tuple(name for name, config in CONFIGS.items() if balance_coefficient(config))
"""Families with a load-balancing loss."""


SAME_IN_MEMORY = ("dbrx",)
"""Families whose tensors have the same names on disk and in memory."""

_NAMED = ("qwen3_5_moe_text",)
"""Families of models that an earlier family computes too, under other names of tensors."""


def family_options(config: dict[str, Any]) -> dict[str, str]:
    """Return the argument of `to_huggingface` that makes it write the family of a config."""
    name = config["model_type"]
    return {"family": name} if name in _NAMED else {}


def has_experts(config: dict[str, Any]) -> bool:
    """Whether the model has more than one expert in some layer."""
    return all(config.get(name, 2) > 1 for name in ("num_experts", "num_local_experts"))


class Golden(NamedTuple):
    """Inputs and outputs of a model of `transformers`."""

    config: dict[str, Any]
    state: dict[str, np.ndarray]
    """Tensors as on disk: one per expert."""
    tokens: np.ndarray
    logits: np.ndarray
    balance: float
    """Load-balancing loss without coefficient; NaN if the family has none."""


def tokens_of(config: dict[str, Any]) -> np.ndarray:
    """Tokens [BATCH LENGTH]."""
    drawn = np.random.default_rng(1).integers(config["vocab_size"], size=(BATCH, LENGTH))
    return drawn.astype(np.int32)


def outputs_of(model: Any, tokens: np.ndarray) -> tuple[np.ndarray, float]:
    """Return logits and load-balancing loss (NaN if the family has none)."""
    import torch

    is_balanced = model.config.model_type in BALANCED and has_experts(model.config.to_dict())
    asked = {"output_router_logits": True} if is_balanced else {}
    with torch.no_grad():
        output = model(torch.tensor(tokens).long(), **asked)
    return output.logits.numpy(), float(output.aux_loss) if asked else float("nan")


def read(name: str) -> Golden:
    """The golden arrays of a case."""
    with np.load(GOLDEN / f"{name}.npz") as arrays:
        state = {
            key.removeprefix("state/"): arrays[key].astype(np.float32)
            for key in arrays.files
            if key.startswith("state/")
        }
        config = json.loads(str(arrays["config"]))
        return Golden(config, state, arrays["tokens"], arrays["logits"], float(arrays["balance"]))


def write(name: str, golden: Golden) -> None:
    """Write the golden arrays."""
    GOLDEN.mkdir(parents=True, exist_ok=True)
    state = {f"state/{key}": value.astype(np.float16) for key, value in golden.state.items()}
    about = {"tokens": golden.tokens, "logits": golden.logits, "balance": golden.balance}
    config = np.asarray(json.dumps(golden.config))
    np.savez_compressed(GOLDEN / f"{name}.npz", config=config, **about, **state)


def write_directory(place, config, state, shard_bytes=1 << 30):
    """Write a model as `save_pretrained` does, and return the directory."""
    place.mkdir(parents=True)
    (place / "config.json").write_text(json.dumps(config))
    planned = {name: Planned(values.shape, "float32") for name, values in state.items()}
    write_tensors(place, planned, state.__getitem__, max_shard_bytes=shard_bytes)
    return place


_RENAMED = {
    "block_sparse_moe.input_linear.weight": "block_sparse_moe.experts.gate_up_proj",
    "block_sparse_moe.output_linear.weight": "block_sparse_moe.experts.down_proj",
    "block_sparse_moe.router.layer.weight": "block_sparse_moe.router.weight",
}
"""Names on disk and in memory of tensors that are stacked in both."""
_EXPERT = re.compile(r"(.*)\.experts\.0\.(?:gate_proj|w1)\.weight")


def stacked(state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The layout in memory of transformers 5: experts stacked, gate before up."""
    state, names = dict(state), ("gate_proj", "up_proj", "down_proj")
    for old, new in _RENAMED.items():
        for key in [key for key in state if key.endswith(old)]:
            state[key.removesuffix(old) + new] = state.pop(key)
    for block in [match[1] for key in list(state) if (match := _EXPERT.fullmatch(key))]:
        if f"{block}.experts.0.w1.weight" in state:
            names = ("w1", "w3", "w2")
        experts: dict[str, list[np.ndarray]] = {name: [] for name in names}
        expert = 0
        while f"{block}.experts.{expert}.{names[0]}.weight" in state:
            for name in names:
                experts[name].append(state.pop(f"{block}.experts.{expert}.{name}.weight"))
            expert += 1
        gate, up, down = (np.stack(experts[name]) for name in names)
        if block.endswith(".feed_forward"):
            state[f"{block}.experts.gate_up_proj"] = np.concatenate([gate, up], axis=1)
            state[f"{block}.experts.down_proj"] = down
            continue
        mlp = block.replace("block_sparse_moe", "mlp")
        state[f"{mlp}.experts.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        state[f"{mlp}.experts.down_proj"] = down
        if f"{block}.gate.weight" in state:
            router = "router" if "model.norm.bias" in state else "gate"  # of Phi-3.5-MoE
            state[f"{mlp}.{router}.weight"] = state.pop(f"{block}.gate.weight")
    return state


_CENTRED = ("qwen3_next", "qwen3_5_moe_text")
"""Families whose gains are 1 + w, those of delta layers excepted."""


def build(config: dict[str, Any]) -> Any:
    """Return the model of `transformers` with deterministic random weights."""
    import torch
    import transformers

    fields = {key: value for key, value in config.items() if key != "model_type"}
    # Its faster experts want rows of whole multiples of 16 bytes.
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    made = transformers.AutoConfig.for_model(config["model_type"], **eager, **fields)
    model = transformers.AutoModelForCausalLM.from_config(made).eval()
    rng = np.random.default_rng(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_gain = parameter.ndim == 1
            is_gain = is_gain and not name.endswith(".bias")
            values = rng.normal(size=parameter.shape) * (0.3 if is_gain else 0.4) + is_gain
            if name.endswith(
                ("gate.weight", "router.weight", "gate.wg.weight", "router.layer.weight")
            ):
                values *= 0.3  # an uneven router, yet one without certainty
            if config["model_type"] in _CENTRED and ".linear_attn." not in name:
                values -= is_gain
            if name.endswith(".linear_attn.A_log"):
                values -= 2.0  # decays of a half, not of almost all
            parameter.copy_(torch.tensor(values.astype(np.float16).astype(np.float32)))
        for name, buffer in model.named_buffers():
            if name.endswith(
                ("e_score_correction_bias", "expert_bias")
            ):  # of the size of differences of scores
                values = (0.2 * rng.normal(size=buffer.shape)).astype(np.float16)
                buffer.copy_(torch.tensor(values.astype(np.float32)))
    return model
