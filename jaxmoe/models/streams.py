# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Repeats rows for mixers with several streams, and merges them behind the layers."""

from __future__ import annotations

from typing import Any

from jaxtyping import Array, Float

from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.records import Stream, TokenInputs
from jaxmoe.models.config import ModelConfig


def begin_streams(
    model: ModelConfig, execution: ExecutionConfig, stream: Stream, tokens: TokenInputs
) -> tuple[Stream, TokenInputs]:
    """Return the stream and the inputs of all layers, with a row for each stream of a sequence.

    Args:
        model: Model with the mixers.
        execution: How it is computed.
        stream: Stream before the first layer.
        tokens: Inputs of all layers.
    """
    mixer: Any = model.kinds[0].mixer  # all are equal if one merges streams
    if not mixer.merges_streams:
        return stream, tokens
    return mixer.spread((stream, tokens), execution.placement)


def end_streams(
    model: ModelConfig, execution: ExecutionConfig, x: Float[Array, "R S D"]
) -> Float[Array, "B S D"]:
    """Return one row for each sequence; called in the module that has the parameters."""
    mixer: Any = model.kinds[0].mixer
    if not mixer.merges_streams:
        return x
    return mixer.merge(model.embed_dim, execution, name="merge_streams")(x)
