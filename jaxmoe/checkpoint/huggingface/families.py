# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Declares the families of `transformers`: the meaning of their config, and rules for tensors.

    olmoe        softmax over all experts, not renormalised (norm_topk_prob); QK-norm over all heads
    mixtral      softmax over the chosen experts; no QK-norm; on disk block_sparse_moe, w1, w3, w2
    qwen3_moe    softmax over all experts, norm_topk_prob; QK-norm over each head; dense layers by
                 mlp_only_layers and decoder_sparse_step
    deepseek_v3  latent attention; sigmoid scores with a bias that affects only the choice; groups
                 of experts ranked by their two best; shared experts; the first layers dense

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
from typing import Any, Final, Literal

from jaxmoe.checkpoint.huggingface import describe, modeling
from jaxmoe.checkpoint.huggingface.fields import Fields
from jaxmoe.checkpoint.huggingface.paths import shown
from jaxmoe.checkpoint.huggingface.weights import EMBEDDING, HEAD, ROUTER_STATE, Rule
from jaxmoe.checkpoint.manifest import CheckpointError
from jaxmoe.configs import closest
from jaxmoe.models.config import (
    AttentionConfig,
    LatentAttentionConfig,
    Mixers,
    ModelConfig,
    MoEConfig,
)
from jaxmoe.routing import (
    METHODS,
    GroupLimitConfig,
    LoadBalanceConfig,
    LossFreeConfig,
    RenormalizedGateConfig,
    SigmoidTopKConfig,
    SoftmaxGateConfig,
    SoftmaxTopKConfig,
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
            f"config.model_type={shown(name)} is not among {', '.join(FAMILIES)}"
            + closest(str(name)[:100], FAMILIES)
        )
    return FAMILIES[name]


def _olmoe(config: Mapping[str, Any]) -> ModelConfig:
    fields = Fields(config)
    moe = _token_choice(fields, expert_dim=fields.size("intermediate_size"))
    fields.only("sliding_window", None, "OLMoE attends to all earlier tokens")
    return _model(fields, moe, _grouped(fields, qk_norm="full"))


def _mixtral(config: Mapping[str, Any]) -> ModelConfig:
    fields = Fields(config)
    parts = METHODS["mixtral"]
    moe = _moe(fields, fields.size("intermediate_size"), parts.router, parts.gate)
    window = fields.get("sliding_window")
    return _model(fields, moe, _grouped(fields, qk_norm="none", rope_theta=1e6, window=window))


def _qwen3_moe(config: Mapping[str, Any]) -> ModelConfig:
    fields = Fields(config)
    moe = _token_choice(fields, expert_dim=fields.size("moe_intermediate_size"))
    window = fields.get("sliding_window")  # ignored without use_sliding_window
    window = window if fields.get("use_sliding_window") else None
    num_layers, step = fields.size("num_hidden_layers"), fields.get("decoder_sparse_step") or 1
    named = frozenset(fields.get("mlp_only_layers") or ())
    dense = tuple(i for i in range(num_layers) if i in named or (i + 1) % step)
    return _model(fields, moe, _grouped(fields, qk_norm="head", window=window), dense=dense)


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
    number, chosen = fields.size("n_group"), fields.size("topk_group")
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
    num_layers, first = fields.size("num_hidden_layers"), fields.there("first_k_dense_replace")
    dense = tuple(range(min(first, num_layers)))
    return _model(fields, moe, attention, dense=dense, has_balance=False)


def _further_tokens(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the prefixes of DeepSeek-V3's layers for multi-token prediction."""
    fields = Fields(config)
    first = fields.size("num_hidden_layers")
    number = fields.get("num_nextn_predict_layers", "num_mtp_layers", default=0)
    return tuple(f"model.layers.{layer}." for layer in range(first, first + number))


def _token_choice(fields: Fields, expert_dim: int) -> MoEConfig:
    """Return softmax over all experts; norm_topk_prob divides by the sum over the chosen ones."""
    is_renormalized = fields.get("norm_topk_prob", default=False)
    gate = RenormalizedGateConfig() if is_renormalized else SoftmaxGateConfig()
    return _moe(fields, expert_dim, SoftmaxTopKConfig(softmax="before"), gate)


def _moe(fields: Fields, expert_dim: int, router: Any, gate: Any) -> MoEConfig:
    return MoEConfig(
        num_experts=fields.size("num_local_experts", "num_experts"),
        top_k=fields.size("num_experts_per_tok"),
        expert_dim=expert_dim,
        router=router,
        gate=gate,
        balancers=(),
    )


def _grouped(
    fields: Fields,
    *,
    qk_norm: Literal["none", "head", "full"],
    rope_theta: float = 10_000.0,
    window: int | None = None,
) -> AttentionConfig:
    """Return grouped-query attention; `rope_theta` is the default of the family."""
    heads, width = fields.size("num_attention_heads"), fields.size("hidden_size")
    if fields.get("head_dim") is None and width % heads:
        raise CheckpointError(
            f"config.hidden_size={width} does not divide by num_attention_heads={heads}, and there"
            " is no head_dim"
        )
    return AttentionConfig(
        num_heads=heads,
        num_kv_heads=fields.get("num_key_value_heads", default=heads),
        head_dim=fields.get("head_dim", default=width // heads),
        qk_norm=qk_norm,
        rope_theta=fields.rope_theta(rope_theta),
        window=window,
    )


def _model(
    fields: Fields,
    moe: MoEConfig,
    attention: Mixers,
    *,
    dense: tuple[int, ...] = (),
    has_balance: bool = True,
) -> ModelConfig:
    """Return the model; a family without `has_balance` has no load-balancing loss."""
    fields.check_supported()
    num_layers, width = fields.size("num_hidden_layers"), fields.size("hidden_size")
    coefficient = fields.get("router_aux_loss_coef", default=0.0)
    model = ModelConfig(
        vocab_size=fields.size("vocab_size"),
        num_layers=num_layers,
        embed_dim=width,
        attention=attention,
        moe=None if len(dense) == num_layers else moe,
        dense_layers=() if len(dense) == num_layers else dense,
        dense_dim=fields.size("intermediate_size"),
        norm_epsilon=float(fields.there("rms_norm_eps")),
        has_tied_embeddings=fields.get("tie_word_embeddings", default=False),
    )
    fields.warn_of_the_rest()
    if model.moe is None or not has_balance:
        return model
    # In transformers the loss is K for a balanced router, once for all layers; here 1 per layer.
    unit = moe.top_k / model.num_moe_layers
    balancers = (LoadBalanceConfig(coefficient=coefficient * unit),)
    return dataclasses.replace(model, moe=dataclasses.replace(moe, balancers=balancers))


_BLOCK = "model.layers.{layer}."


def _rule(path: str, *keys: str, half: int | None = None) -> Rule:
    return Rule(path=path, keys=tuple(_BLOCK + key for key in keys), half=half)


_ROOT = (
    Rule(path="embedding/weight", keys=(EMBEDDING,), is_transposed=False),
    Rule(path="final_norm/gain", keys=("model.norm.weight",)),
    Rule(path="head/weight", keys=(HEAD,)),
)
_NORMS = (
    _rule("attention_norm/gain", "input_layernorm.weight"),
    _rule("feed_forward_norm/gain", "post_attention_layernorm.weight"),
)
_ATTENTION = (
    *_NORMS,
    *(_rule(f"attention/{name}", f"self_attn.{name}_proj.weight") for name in "qkvo"),
)
_QK_NORM = tuple(
    _rule(f"attention/{name}", f"self_attn.{name}.weight") for name in ("q_norm", "k_norm")
)
_LATENT_ATTENTION = (
    *_NORMS,
    *(
        _rule(f"attention/{ours}", f"self_attn.{theirs}.weight")
        for ours, theirs in {
            **{"q": "q_proj", "q_a": "q_a_proj", "q_norm": "q_a_layernorm", "q_b": "q_b_proj"},
            **{"kv_a": "kv_a_proj_with_mqa", "kv_norm": "kv_a_layernorm", "kv_b": "kv_b_proj"},
            "o": "o_proj",
        }.items()
    ),
)


def _swiglu(path: str, block: str) -> tuple[Rule, ...]:
    return (
        _rule(f"{path}/gate_up", f"{block}.gate_proj.weight", half=0),
        _rule(f"{path}/gate_up", f"{block}.up_proj.weight", half=1),
        _rule(f"{path}/down", f"{block}.down_proj.weight"),
    )


_DENSE, _SHARED = _swiglu("feed_forward", "mlp"), _swiglu("moe/shared", "mlp.shared_experts")
_BIAS = _rule(f"{ROUTER_STATE}/bias", "mlp.gate.e_score_correction_bias")


def _experts(block: str, gate: str, up: str, down: str) -> tuple[Rule, ...]:
    """Return rules for router and experts: separate tensors on disk, stacked in memory."""
    expert = f"{block}.experts.{{expert}}."
    in_memory = "mlp.experts.gate_up_proj"
    return (
        _rule("moe/router/weight", f"{block}.gate.weight", "mlp.gate.weight"),
        _rule("moe/experts/gate_up", f"{expert}{gate}.weight", in_memory, half=0),
        _rule("moe/experts/gate_up", f"{expert}{up}.weight", in_memory, half=1),
        _rule("moe/experts/down", f"{expert}{down}.weight", "mlp.experts.down_proj"),
    )


_PROJECTIONS = _experts("mlp", "gate_proj", "up_proj", "down_proj")
_NUMBERED = _experts("block_sparse_moe", "w1", "w3", "w2")

FAMILIES: Final[dict[str, Family]] = {
    "olmoe": Family(
        architecture="OlmoeForCausalLM",
        attention=("grouped_query", "full"),
        model=_olmoe,
        fields=describe.olmoe,
        rules=(*_ROOT, *_ATTENTION, *_QK_NORM, *_PROJECTIONS),
    ),
    "mixtral": Family(
        architecture="MixtralForCausalLM",
        attention=("grouped_query", "none"),
        model=_mixtral,
        fields=describe.mixtral,
        rules=(*_ROOT, *_ATTENTION, *_NUMBERED),
    ),
    "qwen3_moe": Family(
        architecture="Qwen3MoeForCausalLM",
        attention=("grouped_query", "head"),
        model=_qwen3_moe,
        fields=describe.qwen3_moe,
        rules=(*_ROOT, *_ATTENTION, *_QK_NORM, *_DENSE, *_PROJECTIONS),
    ),
    "deepseek_v3": Family(
        architecture="DeepseekV3ForCausalLM",
        attention=("latent", None),
        model=_deepseek_v3,
        fields=describe.deepseek_v3,
        rules=(*_ROOT, *_LATENT_ATTENTION, *_DENSE, *_PROJECTIONS, *_SHARED, _BIAS),
        left_out=_further_tokens,
    ),
}

OWN: Final = Family(
    architecture=modeling.ARCHITECTURE,
    attention=("grouped_query", None),
    model=modeling.model_of,
    fields=modeling.fields_of,
    rules=(
        *(*_ROOT, *_ATTENTION, *_QK_NORM, *_DENSE, *_PROJECTIONS, *_SHARED, _BIAS),
        _rule("attention/gate", "self_attn.gate_proj.weight"),
    ),
)
"""Models with their own modelling file."""
