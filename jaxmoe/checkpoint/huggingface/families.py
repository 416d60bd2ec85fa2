# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Declares the families of `transformers`: the meaning of their config, and rules for tensors.

    olmoe        softmax over all experts, not renormalised (norm_topk_prob); QK-norm over all heads
    mixtral      softmax over the chosen experts; no QK-norm; on disk block_sparse_moe, w1, w3, w2
    qwen3_moe    softmax over all experts, norm_topk_prob; QK-norm over each head; dense layers by
                 mlp_only_layers and decoder_sparse_step
    deepseek_v3  latent attention; sigmoid scores with a bias that affects only the choice; groups
                 of experts ranked by their two best; shared experts; the first layers dense
    jamba, granitemoehybrid      recurrent layers: `hybrids.py`

Config values that this library does not compute are an error; unknown fields are logged as a
warning. The rules of tensors serve import and export.

DeepSeek-V3's bias is router state, not a parameter. The norms of its latents have an epsilon of
1e-6 whatever the config says. Its layers for multi-token prediction, which follow the others, are
left out with a warning, as in transformers.

Checked against transformers 5.23.0.

To add a family: `jaxmoe/checkpoint/huggingface/families.py` (a function from fields to ModelConfig,
rules, a line in FAMILIES), `jaxmoe/checkpoint/huggingface/describe.py` (its inverse),
`tests/jaxmoe/checkpoint/huggingface/test_parity.py` (parity of logits and gradients).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Final

from jaxmoe.checkpoint.huggingface import describe, hybrids, modeling, parts
from jaxmoe.checkpoint.huggingface.fields import Fields
from jaxmoe.checkpoint.huggingface.paths import show_value
from jaxmoe.checkpoint.huggingface.rules import (
    ATTENTION,
    BIAS,
    DENSE,
    LATENT_ATTENTION,
    QK_NORM,
    ROOT,
    SHARED,
    experts,
    rule,
)
from jaxmoe.checkpoint.huggingface.weights import Rule
from jaxmoe.checkpoint.manifest import CheckpointError
from jaxmoe.configs import closest
from jaxmoe.models.config import (
    LatentAttentionConfig,
    ModelConfig,
    MoEConfig,
)
from jaxmoe.routing import (
    METHODS,
    GroupLimitConfig,
    LossFreeConfig,
    RenormalizedGateConfig,
    SigmoidTopKConfig,
    SoftmaxGateConfig,
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One architecture of `transformers`."""

    architecture: str
    """Name of its class in transformers."""
    attention: tuple[str, str | None]
    """Name of the attention config, and its `qk_norm` if it has one."""
    model: Callable[[Mapping[str, Any]], ModelConfig]
    """Function from the fields of a config to a model."""
    fields: Callable[[ModelConfig], dict[str, Any]]
    """Inverse of `model`, where the family can describe the model."""
    rules: tuple[Rule, ...]
    """Rules from tensors to parameters."""
    recurrent: str | None = None
    """Name of the mixer of its recurrent layers, if it has any."""
    left_out: Callable[[Mapping[str, Any]], tuple[str, ...]] = lambda _: ()
    """Function from fields to prefixes of tensors that are not computed here."""


def family_of(fields: Mapping[str, Any]) -> Family:
    """Return the family of a config.

    Raises:
        CheckpointError: The model_type is unknown.
    """
    name = fields.get("model_type")
    if name == modeling.NAME:
        return OWN
    if name not in FAMILIES:
        raise CheckpointError(
            f"config.model_type={show_value(name)} is not among {', '.join(FAMILIES)}"
            + closest(str(name)[:100], FAMILIES)
        )
    return FAMILIES[name]


def _olmoe(config: Mapping[str, Any]) -> ModelConfig:
    fields = Fields(config)
    moe = parts.token_choice(fields, expert_dim=fields.size("intermediate_size"))
    fields.only("sliding_window", None, "OLMoE attends to all earlier tokens")
    return parts.assemble(fields, moe, parts.grouped_attention(fields, qk_norm="full"))


def _mixtral(config: Mapping[str, Any]) -> ModelConfig:
    fields = Fields(config)
    method = METHODS["mixtral"]
    moe = parts.experts(fields, fields.size("intermediate_size"), method.router, method.gate)
    window = fields.get("sliding_window")
    return parts.assemble(
        fields, moe, parts.grouped_attention(fields, qk_norm="none", rope_theta=1e6, window=window)
    )


def _qwen3_moe(config: Mapping[str, Any]) -> ModelConfig:
    fields = Fields(config)
    moe = parts.token_choice(fields, expert_dim=fields.size("moe_intermediate_size"))
    window = fields.get("sliding_window")  # ignored without use_sliding_window
    window = window if fields.get("use_sliding_window") else None
    num_layers = fields.size("num_hidden_layers")
    step = fields.get("decoder_sparse_step") or 1
    dense_layers = frozenset(fields.get("mlp_only_layers") or ())
    dense = tuple(i for i in range(num_layers) if i in dense_layers or (i + 1) % step)
    return parts.assemble(
        fields, moe, parts.grouped_attention(fields, qk_norm="head", window=window), dense=dense
    )


def _deepseek_v3(config: Mapping[str, Any]) -> ModelConfig:
    fields = Fields(config)
    fields.only("scoring_func", "sigmoid", "DeepSeek-V3 scores by sigmoid")
    fields.only("topk_method", "noaux_tc", "DeepSeek-V3 chooses with a bias")
    fields.only("moe_layer_freq", 1, "here every layer after the dense ones has experts")
    heads = fields.size("num_attention_heads")
    fields.only("num_key_value_heads", heads, "every head has keys of its own, from the latent")
    # Fields that only training uses, that other versions wrote, or that follow from other fields.
    for name in ("aux_loss_alpha", "seq_aux", "ep_size", "router_aux_loss_coef", "head_dim"):
        fields.get(name)
    fields.get("num_nextn_predict_layers", "num_mtp_layers")
    attention = LatentAttentionConfig(
        num_heads=heads,
        latent_dim=fields.size("kv_lora_rank"),
        query_latent_dim=fields.size_or_null("q_lora_rank"),
        nope_dim=fields.size("qk_nope_head_dim"),
        rope_dim=fields.size("qk_rope_head_dim"),
        value_dim=fields.size("v_head_dim"),
        rope_theta=fields.rope_theta(10_000.0, has_yarn=True),
        yarn=fields.yarn(),
        rope_layout="interleaved" if fields.get("rope_interleave", default=True) else "halves",
    )
    fields.only("qk_head_dim", attention.head_dim, "it is qk_nope_head_dim + qk_rope_head_dim")
    number = fields.size("n_group")
    chosen = fields.size("topk_group")
    groups = GroupLimitConfig(num_groups=number, top_groups=chosen, best_per_group=2)
    scale = float(fields.there("routed_scaling_factor"))
    is_renormalized = fields.get("norm_topk_prob", default=True)
    moe = MoEConfig(
        num_experts=fields.size("n_routed_experts", "num_local_experts"),
        top_k=fields.size("num_experts_per_tok"),
        expert_dim=fields.size("moe_intermediate_size"),
        num_shared_experts=fields.size("n_shared_experts"),
        router=SigmoidTopKConfig(bias=LossFreeConfig(), groups=groups if chosen < number else None),
        gate=(RenormalizedGateConfig if is_renormalized else SoftmaxGateConfig)(scale=scale),
        balancers=(),
    )
    num_layers = fields.size("num_hidden_layers")
    first = fields.there("first_k_dense_replace")
    dense = tuple(range(min(first, num_layers)))
    return parts.assemble(fields, moe, attention, dense=dense, has_balance=False)


def _further_tokens(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the prefixes of DeepSeek-V3's layers for multi-token prediction."""
    fields = Fields(config)
    first = fields.size("num_hidden_layers")
    number = fields.get("num_nextn_predict_layers", "num_mtp_layers", default=0)
    return tuple(f"model.layers.{layer}." for layer in range(first, first + number))


_NAMES = ("gate_proj", "up_proj", "down_proj")
_PROJECTIONS = experts("mlp", _NAMES)
_NUMBERED = experts("block_sparse_moe", ("w1", "w3", "w2"))

FAMILIES: Final[dict[str, Family]] = {
    "olmoe": Family(
        architecture="OlmoeForCausalLM",
        attention=("grouped_query", "full"),
        model=_olmoe,
        fields=describe.olmoe,
        rules=(*ROOT, *ATTENTION, *QK_NORM, *_PROJECTIONS),
    ),
    "mixtral": Family(
        architecture="MixtralForCausalLM",
        attention=("grouped_query", "none"),
        model=_mixtral,
        fields=describe.mixtral,
        rules=(*ROOT, *ATTENTION, *_NUMBERED),
    ),
    "qwen3_moe": Family(
        architecture="Qwen3MoeForCausalLM",
        attention=("grouped_query", "head"),
        model=_qwen3_moe,
        fields=describe.qwen3_moe,
        rules=(*ROOT, *ATTENTION, *QK_NORM, *DENSE, *_PROJECTIONS),
    ),
    "deepseek_v3": Family(
        architecture="DeepseekV3ForCausalLM",
        attention=("latent", None),
        model=_deepseek_v3,
        fields=describe.deepseek_v3,
        rules=(*ROOT, *LATENT_ATTENTION, *DENSE, *_PROJECTIONS, *SHARED, BIAS),
        left_out=_further_tokens,
    ),
    "jamba": Family(
        architecture="JambaForCausalLM",
        attention=("grouped_query", "none"),
        recurrent="mamba",
        model=hybrids.jamba,
        fields=hybrids.jamba_fields,
        rules=hybrids.JAMBA_RULES,
    ),
    "granitemoehybrid": Family(
        architecture="GraniteMoeHybridForCausalLM",
        attention=("grouped_query", "none"),
        recurrent="mamba2",
        model=hybrids.granite_moe_hybrid,
        fields=hybrids.granite_moe_hybrid_fields,
        rules=hybrids.GRANITE_RULES,
    ),
}

OWN: Final = Family(
    architecture=modeling.ARCHITECTURE,
    attention=("grouped_query", None),
    model=modeling.model_of,
    fields=modeling.fields_of,
    rules=(
        *ROOT,
        *ATTENTION,
        *QK_NORM,
        *DENSE,
        *_PROJECTIONS,
        *SHARED,
        BIAS,
        rule("attention/gate", "self_attn.gate_proj.weight"),
    ),
)
"""Models with their own modelling file."""
