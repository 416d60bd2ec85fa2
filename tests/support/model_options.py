# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Makes fields of models, attention and MoE layers from a flat table of options."""

import dataclasses
from typing import Any

from jaxmoe.layers.feed_forwards.moe.config import MoEOptions
from jaxmoe.layers.mixers.attention_parts import AttentionOptions
from jaxmoe.models.config import ModelOptions


def attention_fields(**options: Any) -> dict[str, Any]:
    """Return the fields of `AttentionConfig`, those of its options in a record of their own."""
    return _fields(AttentionOptions, options)


def moe_fields(**options: Any) -> dict[str, Any]:
    """Return the fields of `MoEConfig`, those of its options in a record of their own."""
    return _fields(MoEOptions, options)


def model_fields(**options: Any) -> dict[str, Any]:
    """Return the fields of `ModelConfig`, those of its options in a record of their own."""
    return _fields(ModelOptions, options)


def _fields(record: Any, options: dict[str, Any]) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(record)}
    inner = {name: value for name, value in options.items() if name in names}
    outer = {name: value for name, value in options.items() if name not in names}
    return outer | ({"options": record(**inner)} if inner else {})
