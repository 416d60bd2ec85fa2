# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Rows of what does not combine with layers called one by one; see `jaxmoe.combinations`."""

from __future__ import annotations

from typing import Final

from jaxmoe.choices import Row, above, member, trait

_SWEPT: Final = member("training.objective", "swept_layers")
ROWS: Final = (
    Row(
        _SWEPT,
        above("execution.mesh.stage", 1),
        "{first} evaluates all layers at once, and {second} has some on each device",
        "set execution.mesh.stage to 1, or training.objective to next_token",
    ),
    Row(
        _SWEPT,
        above("execution.mesh.seq", 1),
        "{first} evaluates layers on whole rows, and {second} cuts them",
        "set execution.mesh.seq to 1, or training.objective to next_token",
    ),
    Row(
        _SWEPT,
        trait("training.gradients", "is_backward", "without a backward pass", value=False),
        "{first} reads the parameters of layers as they are stored, and {second} gives layers"
        " others",
        "set training.gradients to backprop",
    ),
    Row(
        _SWEPT,
        member("optimizer", "mkor"),
        "{first} evaluates layers by itself, and {second} measures the matrices of those of a pass",
        "choose another optimizer",
    ),
)
