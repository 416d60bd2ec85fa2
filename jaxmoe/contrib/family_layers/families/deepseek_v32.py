# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V3.2: DeepSeek-V3 with keys that a lightning indexer chooses (arXiv 2512.02556).

Queries always have a latent. Layers for multi-token prediction, which follow the others, are left
out with a warning.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Final

from jaxmoe.checkpoint.huggingface import parts
from jaxmoe.checkpoint.huggingface.describe import (
    feed_forward_types_of,
    grouped_expert_fields,
    latent_fields,
    shared_fields,
)
from jaxmoe.checkpoint.huggingface.family import Family
from jaxmoe.checkpoint.huggingface.fields import Fields
from jaxmoe.checkpoint.huggingface.rules import (
    BIAS,
    DENSE,
    LATENT_ATTENTION,
    PROJECTED_EXPERTS,
    ROOT,
    SHARED,
    rule,
)
from jaxmoe.checkpoint.manifest import CheckpointError
from jaxmoe.contrib.family_layers.sparse_latent import SparseLatentConfig
from jaxmoe.models.config import ModelConfig

_KIND: Final = "indexed_attention"
_INDEXER: Final = {
    "index_q": "wq_b.weight",
    "index_k": "wk.weight",
    "index_k_norm": "k_norm.weight",
    "index_k_bias": "k_norm.bias",
    "index_weights": "weights_proj.weight",
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DeepseekV32Family(Family):
    """DeepSeek-V3.2."""

    name: ClassVar[str] = "deepseek_v32"
    architecture: ClassVar[str] = "DeepseekV32ForCausalLM"
    attention: ClassVar[tuple[str, str | None]] = ("sparse_latent", None)
    rules = (
        *ROOT,
        *LATENT_ATTENTION,
        *(
            rule(f"attention/{ours}", f"self_attn.indexer.{theirs}")
            for ours, theirs in _INDEXER.items()
        ),
        *DENSE,
        *PROJECTED_EXPERTS,
        *SHARED,
        BIAS,
    )

    def model(self, config: Mapping[str, Any]) -> ModelConfig:
        """Return the model of a config."""
        fields = Fields(config)
        fields.get("num_nextn_predict_layers")
        fields.only("rope_interleave", True, "neighbouring features turn together")
        fields.only("moe_layer_freq", 1, "every layer after the dense ones has experts")
        count = fields.size("num_hidden_layers")
        parts.named_layers(fields, "layer_types", (_KIND,), [_KIND] * count)
        attention = SparseLatentConfig(
            latent=parts.latent_attention(fields),
            index_heads=fields.get("index_n_heads", default=64),
            index_dim=fields.get("index_head_dim", default=128),
            index_top_k=fields.get("index_topk", default=2048),
        )
        return parts.assemble(
            fields,
            parts.sigmoid_experts(fields),
            attention,
            dense=parts.layers_named_dense(fields, 3),
            has_balance=False,
        )

    def fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the fields of a model."""
        attention: Any = model.attention
        if attention.name != "sparse_latent":
            raise CheckpointError(
                f"DeepSeek-V3.2 has the attention sparse_latent, and model.attention is"
                f" {attention.name}"
            )
        latent = dataclasses.replace(model, attention=attention.latent)
        fields = shared_fields(latent) | latent_fields(latent, "DeepSeek-V3.2")
        del fields["rope_interleave"]
        return (
            fields
            | grouped_expert_fields(model)
            | feed_forward_types_of(model)
            | {
                "scoring_func": "sigmoid",
                "topk_method": "noaux_tc",
                "layer_types": [_KIND] * model.num_layers,
                "index_n_heads": attention.index_heads,
                "index_head_dim": attention.index_dim,
                "index_topk": attention.index_top_k,
                "num_nextn_predict_layers": 0,
            }
        )

    def left_out(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the prefixes of the layers for multi-token prediction."""
        return parts.further_layers(config)
