# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Models with a modelling file of their own: any that `modeling.py` computes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Final

from jaxmoe.checkpoint.huggingface import modeling
from jaxmoe.checkpoint.huggingface.family import Family, family
from jaxmoe.checkpoint.huggingface.rules import (
    ATTENTION,
    BIAS,
    DENSE,
    PROJECTED_EXPERTS,
    QK_NORM,
    ROOT,
    SHARED,
    rule,
)
from jaxmoe.models.config import ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OwnFamily(Family):
    """Models of no family of transformers."""

    name: ClassVar[str] = modeling.NAME
    architecture: ClassVar[str] = modeling.ARCHITECTURE
    attention: ClassVar[tuple[str, str | None]] = ("grouped_query", None)
    rules = (
        *ROOT,
        *ATTENTION,
        *QK_NORM,
        *DENSE,
        *PROJECTED_EXPERTS,
        *SHARED,
        BIAS,
        rule("attention/gate", "self_attn.gate_proj.weight"),
    )

    def model(self, config: Mapping[str, Any]) -> ModelConfig:
        """Return the model of a config."""
        return modeling.model_of(config)

    def fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the fields of a model."""
        return modeling.fields_of(model)


OWN: Final = OwnFamily()
"""The family of models with a modelling file of their own."""


def family_of(fields: Mapping[str, Any]) -> Family:
    """Return the family of a config.

    Args:
        fields: Fields of config.json.

    Raises:
        CheckpointError: The model_type is unknown.
    """
    name: Any = fields.get("model_type")  # of any type, in a file of any origin
    return OWN if name == OWN.name else family(name).of_files(fields)
