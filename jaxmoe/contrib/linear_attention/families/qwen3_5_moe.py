# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Qwen3.5-MoE, the model of text: Qwen3-Next with experts in all layers and plainer tensors.

Gates are always divided by their sum. Positions of text are the same in all three directions of its
RoPE, which is then the plain one. Of the model of text and images the text model is read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from jaxmoe.checkpoint.huggingface.family import WholeModel
from jaxmoe.checkpoint.huggingface.fields import Fields
from jaxmoe.contrib.linear_attention.families.qwen3_next import (
    SHARED_RULES,
    Qwen3NextFamily,
    assemble,
    delta_fields,
    delta_tensor,
)
from jaxmoe.models.config import ModelConfig

_DEFAULTS = {"head_dim": 256, "router_aux_loss_coef": 0.001}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Qwen35MoeFamily(Qwen3NextFamily):
    """Qwen3.5-MoE, its model of text."""

    name: ClassVar[str] = "qwen3_5_moe_text"
    architecture: ClassVar[str] = "Qwen3_5MoeForCausalLM"
    whole_model: ClassVar[WholeModel | None] = WholeModel(
        name="qwen3_5_moe",
        prefix="model.language_model.",
        replacement="model.",
        left_out=("model.visual.",),
    )
    rules = (
        *SHARED_RULES,
        *delta_tensor(("q", "k", "v"), "in_proj_qkv.weight"),
        *delta_tensor(("z",), "in_proj_z.weight"),
        *delta_tensor(("beta",), "in_proj_b.weight"),
        *delta_tensor(("dt",), "in_proj_a.weight"),
    )

    def model(self, config: Mapping[str, Any]) -> ModelConfig:
        """Return the model of a config."""
        is_renormalized = {"norm_topk_prob": True}  # there is no field for it
        fields = Fields({**_DEFAULTS, **config, **is_renormalized})
        return assemble(fields, (), dense_dim=fields.size("moe_intermediate_size"))

    def fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the fields of a model."""
        return delta_fields(model)
