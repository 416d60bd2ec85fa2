# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Fields and tensors that families with recurrent layers share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from jaxmoe.checkpoint.huggingface.fields import Fields
from jaxmoe.checkpoint.huggingface.paths import show_value
from jaxmoe.checkpoint.huggingface.rules import rule
from jaxmoe.checkpoint.manifest import CheckpointError
from jaxmoe.models.config import ModelConfig

EXPAND: Final = 2
"""Channels of recurrent layers over the width, in configs of models without any."""
_NO_LIMIT = ("[0.0, inf]", "[0, inf]", "[0.0, {'__float__': 'Infinity'}]", "[0.0, 'Infinity']")


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


_INPUTS = ("z", "x", "b", "c", "dt")
MAMBA2: Final = (
    *fuse("mamba2", _INPUTS, "in_proj.weight"),
    *fuse("mamba2", tuple(f"{name}_in_bias" for name in _INPUTS), "in_proj.bias"),
    *fuse("mamba2", ("x_taps", "b_taps", "c_taps"), "conv1d.weight", layout="depthwise"),
    *fuse("mamba2", ("x_bias", "b_bias", "c_bias"), "conv1d.bias"),
    rule("mamba2/dt_bias", "mamba.dt_bias"),
    rule("mamba2/a_log", "mamba.A_log"),
    rule("mamba2/skip", "mamba.D"),
    rule("mamba2/norm", "mamba.norm.weight", layout="flat"),
    rule("mamba2/o", "mamba.out_proj.weight"),
    rule("mamba2/o_bias", "mamba.out_proj.bias"),
)
"""Rules of a layer of Mamba-2."""


def check_steps(fields: Fields) -> None:
    """Raise for bounds of the steps of Mamba-2, which have none here.

    Args:
        fields: Fields of a config.

    Raises:
        CheckpointError: There are some.
    """
    limit = fields.get("time_step_limit")
    if limit is not None and str(list(limit)) not in _NO_LIMIT:
        raise CheckpointError(
            f"config.time_step_limit={show_value(limit)} is not supported, only [0, infinity]:"
            f" steps are"
            " not bounded here"
        )
