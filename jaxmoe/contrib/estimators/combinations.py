# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Rows of what does not combine with gradients from forward passes; see `jaxmoe.combinations`."""

from __future__ import annotations

from typing import Final

from jaxmoe.choices import Row, above, equals, is_set, member, that, trait
from jaxmoe.combinations import fetched_row, gathered_row

_STAGES: Final = above("execution.mesh.stage", 1)
_LEVELS: Final = equals("data.packing", "levels")
_DETAILED: Final = equals("execution.telemetry", "detailed")
_FORWARD: Final = trait("training.gradients", "is_backward", "without a backward pass", value=False)
_ONE_STAGE: Final = "set execution.mesh.stage to 1"


ROWS: Final = (
    Row(
        _STAGES,
        _FORWARD,
        "{second} has no backward pass and no pipeline, and {first} is one",
        f"{_ONE_STAGE}, or training.gradients to backprop",
    ),
    gathered_row(_FORWARD),
    fetched_row(_FORWARD),
    Row(
        _FORWARD,
        _DETAILED,
        "{first} has no backward pass, and {second} observes gradients of layers",
        "set execution.telemetry to brief",
    ),
    Row(
        _FORWARD,
        member("parts.*", "gradient_comparison", shown="parts"),
        "{second} compares gradients of backward passes, and {first} has none",
        "leave gradient_comparison out of parts",
    ),
    Row(
        _FORWARD,
        _LEVELS,
        "{second} makes micro-batches for backward passes, and {first} has none",
        "set data.packing to best_fit",
    ),
    Row(
        _FORWARD,
        that(
            "execution",
            "cut over replicas",
            lambda execution: execution.mesh.replica > 1 and execution.rules == "hybrid",
            shown="execution.rules",
        ),
        "{first} has no backward pass, and each replica computes with all parameters: {second} cuts"
        " them over replicas",
        "set execution.rules to fully_sharded",
    ),
    Row(
        _FORWARD,
        that(
            "execution",
            "with replicas",
            lambda execution: execution.mesh.replica > 1 and execution.mesh_fold is not None,
            shown="execution.fold",
        ),
        "{first} has no backward pass, and replicas compute by themselves, without {second}",
        "set execution.mesh.replica to 1",
    ),
    Row(
        that(
            "training.gradients",
            "whose clip means nothing",
            lambda gradients: gradients.clips == "nothing",
        ),
        is_set("training.clip"),
        "{second} limits the norm of a gradient, and that of {first} has no meaning",
        "set training.clip to None",
    ),
    Row(
        that(
            "training.gradients",
            "whose clip limits projections",
            lambda gradients: gradients.clips == "projection",
        ),
        that(
            "",
            "set",
            lambda config: config.training.clip is not None,
            shown="training.clip",
            needs=("training", "optimizer"),
        ),
        "{second} limits each derivative along a direction, which is as large as the norm of the"
        " gradient, and leaves of {first} little more than signs",
        "set training.clip to None",
    ),
    Row(
        trait("training.gradients", "optimizers", "with optimizers of its own"),
        that(
            "",
            "none of them",
            lambda config: (
                config.training.gradients.optimizers
                and config.optimizer.name not in config.training.gradients.optimizers
            ),
            shown="optimizer",
            needs=("training", "optimizer"),
        ),
        "{second} divides a gradient by its size, and {first} is defined by steps in proportion to"
        " the derivatives",
        "choose optimizer:sgd",
    ),
    *(
        Row(
            member("training.gradients", "seed_pool"),
            is_set(f"optimizer.{field}"),
            "{second} moves parameters beside the sums of derivatives, which are all that {first}"
            " sends",
            f"set optimizer.{field} to 0",
        )
        for field in ("momentum", "weight_decay")
    ),
)
