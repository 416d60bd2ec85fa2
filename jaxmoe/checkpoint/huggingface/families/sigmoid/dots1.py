# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""dots.llm1: QK-norm over each head, the experts of DeepSeek-V3, windows in the last layers.

Layers have a window by `layer_types`, or from `max_window_layers` on (arXiv 2506.05767).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from jaxmoe.checkpoint.huggingface import parts
from jaxmoe.checkpoint.huggingface.describe import (
    grouped_expert_fields,
    layer_types_of,
    shared_fields,
)
from jaxmoe.checkpoint.huggingface.family import Family
from jaxmoe.checkpoint.huggingface.fields import Fields
from jaxmoe.checkpoint.huggingface.rules import (
    ATTENTION,
    BIAS,
    DENSE,
    PROJECTED_EXPERTS,
    QK_NORM,
    ROOT,
    SHARED,
)
from jaxmoe.models.config import ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Dots1Family(Family):
    """dots.llm1."""

    name: ClassVar[str] = "dots1"
    architecture: ClassVar[str] = "Dots1ForCausalLM"
    attention: ClassVar[tuple[str, str | None]] = ("grouped_query", "head")
    rules = (*ROOT, *ATTENTION, *QK_NORM, *DENSE, *PROJECTED_EXPERTS, *SHARED, BIAS)

    def model(self, config: Mapping[str, Any]) -> ModelConfig:
        """Return the model of a config."""
        fields = Fields({"norm_topk_prob": False, **config})
        count = fields.size("num_hidden_layers")
        first = fields.get("max_window_layers", default=count)
        if fields.get("sliding_window") is None:
            first = count
        default = [parts.SLIDING if layer >= first else parts.FULL for layer in range(count)]
        attention = parts.grouped_attention(fields, qk_norm="head")
        mixers = parts.windowed_attention(fields, attention, default)
        return parts.assemble(
            fields,
            parts.sigmoid_experts(fields),
            mixers[0],
            dense=parts.first_layers(fields),
            layers=parts.layers_of(mixers, mixers[0]),
            has_balance=False,
        )

    def fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the fields of a model."""
        return (
            shared_fields(model)
            | grouped_expert_fields(model)
            | layer_types_of(model)
            | {
                "head_dim": model.attention.head_dim,
                "max_window_layers": model.num_layers,
                "scoring_func": "sigmoid",
            }
        )
