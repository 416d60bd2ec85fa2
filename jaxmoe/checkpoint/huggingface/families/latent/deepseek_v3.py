# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V3: latent attention, sigmoid scores with a bias, groups of experts (arXiv 2412.19437).

The bias affects only the choice; it is router state, not a parameter. Groups are ranked by their
two best experts; the first layers are dense. The norms of the latents have an epsilon of 1e-6
whatever the config says. Layers for multi-token prediction, which follow the others, are left out
with a warning, as in transformers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from jaxmoe.checkpoint.huggingface import parts
from jaxmoe.checkpoint.huggingface.describe import moe_of, shared_fields
from jaxmoe.checkpoint.huggingface.family import Family
from jaxmoe.checkpoint.huggingface.fields import YARN, Fields
from jaxmoe.checkpoint.huggingface.rules import (
    BIAS,
    DENSE,
    LATENT_ATTENTION,
    PROJECTED_EXPERTS,
    ROOT,
    SHARED,
)
from jaxmoe.checkpoint.manifest import CheckpointError
from jaxmoe.models.config import LatentAttentionConfig, ModelConfig, MoEConfig
from jaxmoe.routing import (
    GroupLimitConfig,
    LossFreeConfig,
    RenormalizedGateConfig,
    SigmoidTopKConfig,
    SoftmaxGateConfig,
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DeepseekV3Family(Family):
    """DeepSeek-V3."""

    name: ClassVar[str] = "deepseek_v3"
    architecture: ClassVar[str] = "DeepseekV3ForCausalLM"
    attention: ClassVar[tuple[str, str | None]] = ("latent", None)
    rules = (*ROOT, *LATENT_ATTENTION, *DENSE, *PROJECTED_EXPERTS, *SHARED, BIAS)

    def model(self, config: Mapping[str, Any]) -> ModelConfig:
        """Return the model of a config."""
        fields = Fields(config)
        fields.only("scoring_func", "sigmoid", "DeepSeek-V3 scores by sigmoid")
        fields.only("topk_method", "noaux_tc", "DeepSeek-V3 chooses with a bias")
        fields.only("moe_layer_freq", 1, "here every layer after the dense ones has experts")
        heads = fields.size("num_attention_heads")
        fields.only("num_key_value_heads", heads, "every head has keys of its own, from the latent")
        # Fields of training, of other versions, or that follow from other fields.
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
            router=SigmoidTopKConfig(
                bias=LossFreeConfig(), groups=groups if chosen < number else None
            ),
            gate=(RenormalizedGateConfig if is_renormalized else SoftmaxGateConfig)(scale=scale),
            balancers=(),
        )
        num_layers = fields.size("num_hidden_layers")
        first = fields.there("first_k_dense_replace")
        dense = tuple(range(min(first, num_layers)))
        return parts.assemble(fields, moe, attention, dense=dense, has_balance=False)

    def fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the fields of a model."""
        moe = moe_of(model)
        attention: Any = model.attention
        if attention.name != "latent":
            raise CheckpointError(
                f"DeepSeek-V3 has latent attention, and model.attention is {attention.name}"
            )
        router: Any = moe.router
        groups = router.groups if router.score_function == "sigmoid" else None
        rope = {}
        if (yarn := attention.yarn) is not None:
            stretched = {theirs: getattr(yarn, ours) for ours, theirs in YARN.items()}
            new = {"rope_type": "yarn", "rope_theta": attention.rope_theta, **stretched}
            rope = {"rope_parameters": new, "rope_scaling": {"type": "yarn", **stretched}}
        return (
            shared_fields(model)
            | rope
            | {
                "kv_lora_rank": attention.latent_dim,
                "q_lora_rank": attention.query_latent_dim,
                "qk_nope_head_dim": attention.nope_dim,
                "qk_rope_head_dim": attention.rope_dim,
                "qk_head_dim": attention.head_dim,
                "head_dim": attention.rope_dim,
                "v_head_dim": attention.value_dim,
                "rope_interleave": attention.rope_layout == "interleaved",
                "intermediate_size": model.dense_dim,
                "moe_intermediate_size": moe.expert_dim,
                "n_routed_experts": moe.num_experts,
                "n_shared_experts": moe.num_shared_experts,
                "n_group": groups.num_groups if groups else 1,
                "topk_group": groups.top_groups if groups else 1,
                "norm_topk_prob": moe.gate.name == "renormalized",
                "routed_scaling_factor": getattr(moe.gate, "scale", 1.0),
                "scoring_func": "sigmoid",
                "topk_method": "noaux_tc",
                "first_k_dense_replace": len(model.dense_layers) if model.moe else model.num_layers,
                "moe_layer_freq": 1,
                "num_nextn_predict_layers": 0,
            }
        )

    def left_out(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the prefixes of the layers for multi-token prediction."""
        fields = Fields(config)
        first = fields.size("num_hidden_layers")
        number = fields.get("num_nextn_predict_layers", "num_mtp_layers", default=0)
        return tuple(f"model.layers.{layer}." for layer in range(first, first + number))
