# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Fields and tensors that families with recurrent layers share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from jaxmoe.checkpoint.huggingface.rules import rule
from jaxmoe.checkpoint.manifest import CheckpointError
from jaxmoe.models.config import ModelConfig

EXPAND: Final = 2
"""Channels of recurrent layers over the width, in configs of models without any."""


def recurrent_mixer(model: ModelConfig, default: Any) -> Any:
    """Return the recurrent mixer of a model, or one to describe where it has none.

    Raises:
        CheckpointError: The model has another one.
    """
    for index, kind in enumerate(model.kinds):
        if kind.mixer.is_recurrent:
            if kind.mixer.name != default.name:
                raise CheckpointError(
                    f"layer {index} of model.layers is {kind.mixer.name}, and those of this family"
                    f" are {default.name}"
                )
            return kind.mixer
    return default


def mamba_fields(model: ModelConfig, mixer: Any) -> dict[str, Any]:
    """Return the fields of recurrent layers that families share."""
    is_used = any(kind.mixer.is_recurrent for kind in model.kinds)
    if is_used and mixer.inner_dim % model.embed_dim:
        raise CheckpointError(
            f"the {mixer.name} layers of model.layers have {mixer.inner_dim} channels, which must"
            f" be a multiple of model.embed_dim={model.embed_dim} (mamba_expand is an integer)"
        )
    return {
        "mamba_expand": mixer.inner_dim // model.embed_dim if is_used else EXPAND,
        "mamba_d_state": mixer.state_dim,
        "mamba_d_conv": mixer.conv_length,
        "mamba_conv_bias": mixer.has_conv_bias,
        "mamba_proj_bias": mixer.has_projection_bias,
    }


def fuse(mixer: str, names: Sequence[str], key: str, **options: Any) -> tuple[Any, ...]:
    """Return the rules of parameters of one mixer that follow one another in a tensor."""
    paths = tuple(f"{mixer}/{name}" for name in names)
    return tuple(rule(path, f"mamba.{key}", fused=paths, **options) for path in paths)
