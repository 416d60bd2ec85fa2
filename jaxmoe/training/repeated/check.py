# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Refuses what an adapter that compares several passes over a row cannot be trained with."""

from __future__ import annotations

from jaxmoe.models.config import ModelConfig


def num_passes(model: ModelConfig) -> int:
    """Return the passes over each row of a step that the adapter of a model compares."""
    return 1 if model.adapter is None else model.adapter.passes


def check_repeated(model: ModelConfig, *, name: str, is_backward: bool) -> None:
    """Refuse what an adapter that compares passes cannot be trained with.

    Args:
        model: Model with its adapter.
        name: Name of the estimator of the gradient.
        is_backward: Whether it has a backward pass.

    Raises:
        ValueError: A gradient without a backward pass, or a loop over layers, whose turns but the
            last report no losses.
    """
    if num_passes(model) == 1 or model.adapter is None:
        return
    start = f"adapter:{model.adapter.name} trains a router by the losses of several draws, and"
    if not is_backward:
        raise ValueError(
            f"{start} training.gradients:{name} has no backward pass: set training.gradients to"
            " backprop"
        )
    if model.loop is not None:
        raise ValueError(
            f"{start} model.loop draws anew in each turn and keeps the last: set model.loop to None"
        )
