# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Rows of what does not combine with modules behind a model; see `jaxmoe.combinations`."""

from __future__ import annotations

from typing import Final

from jaxmoe.choices import Row, above, is_set, member, no_member, trait

_MODULES: Final = member("model.options.predictor", "multi_token_prediction")
ROWS: Final = (
    Row(
        _MODULES,
        no_member("training.objective", "multi_token_prediction"),
        "{first} adds modules to the model, and {second} does not train them",
        "set training.objective to multi_token_prediction, or leave model.options.predictor out",
    ),
    Row(
        _MODULES,
        above("execution.mesh.stage", 1),
        "modules of {first} follow the last layer, and {second} has some layers on each device",
        "set execution.mesh.stage to 1, or leave model.options.predictor out",
    ),
    Row(
        _MODULES,
        is_set("model.adapter"),
        "{first} adds modules to the model, and {second} has no additions to their matrices",
        "leave one of the two out",
    ),
    Row(
        _MODULES,
        trait("training.gradients", "is_backward", "without a backward pass", value=False),
        "{first} reads parameters as they are stored, and {second} gives layers others",
        "set training.gradients to backprop, or leave model.options.predictor out",
    ),
    Row(
        _MODULES,
        member("optimizer", "mkor"),
        "{first} has layers of its own, and {second} measures the matrices of those of the model",
        "choose another optimizer, or leave model.options.predictor out",
    ),
)
