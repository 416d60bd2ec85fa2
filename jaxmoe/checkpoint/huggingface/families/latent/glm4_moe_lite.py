# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""GLM-4.7-Flash: attention and experts of DeepSeek-V3, dense layers by `mlp_layer_types`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from jaxmoe.checkpoint.huggingface import parts
from jaxmoe.checkpoint.huggingface.describe import (
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
)
from jaxmoe.models.config import ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Glm4MoeLiteFamily(Family):
    """GLM-4.7-Flash."""

    name: ClassVar[str] = "glm4_moe_lite"
    architecture: ClassVar[str] = "Glm4MoeLiteForCausalLM"
    attention: ClassVar[tuple[str, str | None]] = ("latent", None)
    rules = (*ROOT, *LATENT_ATTENTION, *DENSE, *PROJECTED_EXPERTS, *SHARED, BIAS)

    def model(self, config: Mapping[str, Any]) -> ModelConfig:
        """Return the model of a config."""
        fields = Fields(config)
        for name in ("num_nextn_predict_layers", "first_k_dense_replace", "partial_rotary_factor"):
            fields.get(name)  # of layers that are left out, or without a meaning here
        count = fields.size("num_hidden_layers")
        kinds = parts.named_layers(
            fields, "mlp_layer_types", ("dense", "sparse"), ["dense"] + ["sparse"] * (count - 1)
        )
        return parts.assemble(
            fields,
            parts.sigmoid_experts(fields),
            parts.latent_attention(fields),
            dense=tuple(index for index, kind in enumerate(kinds) if kind == "dense"),
            has_balance=False,
        )

    def fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the fields of a model."""
        kinds = ["sparse" if kind.feed_forward.is_routed else "dense" for kind in model.kinds]
        return (
            shared_fields(model)
            | latent_fields(model, "GLM-4.7-Flash")
            | grouped_expert_fields(model)
            | {"mlp_layer_types": kinds, "num_nextn_predict_layers": 0}
        )

    def left_out(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the prefixes of the layers for multi-token prediction."""
        return parts.further_layers(config)
