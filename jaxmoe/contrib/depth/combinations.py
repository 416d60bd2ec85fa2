# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Rows of what does not combine with halves, loops, skipped layers; see `jaxmoe.combinations`."""

from __future__ import annotations

from typing import Final

from jaxmoe.choices import Row, above, differs, equals, is_set, member, no_member, that
from jaxmoe.combinations import ONE_STAGE, REARRANGES_ROWS, SHARED_HEADS
from jaxmoe.training.balance import takes_two_passes

_STAGES: Final = above("execution.mesh.stage", 1)
_LEVELS: Final = equals("data.packing", "levels")
_DETAILED: Final = equals("execution.telemetry", "detailed")
_SKIPPING: Final = is_set("training.skipping")
_HALVES: Final = equals("execution.halves", 2)
_ONE_HALF: Final = "set execution.halves to 1"
_ONE_STAGE: Final = "set execution.mesh.stage to 1"

ROWS: Final = (
    Row(
        REARRANGES_ROWS,
        that("model", "of other mixers", lambda model: len(model.mixers) > 1, "model.layers"),
        "parallel streams pass through every layer, and model.layers has other mixers than {first}",
        "set model.attention to the mixer with streams and leave those of model.layers out",
    ),
    Row(
        _STAGES,
        is_set("model.loop"),
        "model.loop calls layers again after the last of them, and {first} passes every micro-batch"
        " through them once",
        f"{_ONE_STAGE}, or leave model.loop out",
    ),
    Row(
        _HALVES,
        _STAGES,
        "{first} halves micro-batches that {second} overlaps already",
        "set one of them to 1",
    ),
    Row(
        _HALVES,
        that(
            "execution.dispatcher",
            "with a bound",
            lambda dispatcher: dispatcher.traits.has_bound,
        ),
        "{first} sends half of a device's rows at a time, and {second} drops what exceeds a bound"
        " of those: other rows than of the whole",
        f"choose execution.dispatcher:all_to_all, or {_ONE_HALF}",
    ),
    Row(
        _HALVES,
        REARRANGES_ROWS,
        "{first} takes every other row, and the streams of {second} are rows next to one another",
        _ONE_HALF,
    ),
    Row(
        _HALVES,
        is_set("model.moe.capacity"),
        "{first} routes the halves of a batch apart, and {second} compares the tokens of a batch",
        f"set model.moe.capacity to None, or {_ONE_HALF}",
    ),
    Row(
        _HALVES,
        that(
            "model.moe.router",
            "that compares tokens",
            lambda router: router.traits.sees_others or router.traits.evens_load,
        ),
        "{first} routes the halves of a batch apart, and {second} compares the tokens of a batch",
        f"choose another router, or {_ONE_HALF}",
    ),
    Row(
        _HALVES,
        SHARED_HEADS,
        "{first} splits what flows from layer to layer by positions, and the layers of {second}"
        " share arrays that are split by heads",
        _ONE_HALF,
    ),
    Row(
        is_set("model.loop.connection"),
        that(
            "model.residual",
            "of several arrays",
            lambda residual: residual.arrays > 1,
        ),
        "model.loop.connection has streams of its own, and {second} passes several arrays from"
        " layer to layer",
        "set model.residual to standard, or leave model.loop.connection out",
    ),
    *(
        Row(
            member("model.layers.feed_forward", "two_sizes"),
            choice,
            "the budget of {first} is a mean over whole batches, and {second} computes them in"
            " parts",
            way_out,
        )
        for choice, way_out in ((_HALVES, _ONE_HALF), (_STAGES, _ONE_STAGE))
    ),
    Row(
        _SKIPPING,
        no_member("training.gradients", "backprop"),
        "{second} takes its gradient of all layers, and training.skipping leaves out some",
        "set training.skipping to None",
    ),
    Row(
        _SKIPPING,
        equals("training.accumulation", 1),
        "training.skipping leaves out other layers in each micro-batch, and {second} has one",
        "set training.accumulation to 2 or more",
    ),
    Row(
        _SKIPPING,
        that(
            "execution",
            "`gpipe` on stages",
            lambda execution: execution.mesh.stage > 1 and execution.pipeline_order.name == "gpipe",
            shown="execution.pipeline",
        ),
        "{second} has no timetable for training.skipping",
        "set execution.pipeline to interleaved",
    ),
    Row(
        _SKIPPING,
        that(
            "execution",
            "`deferred` on stages",
            lambda execution: execution.mesh.stage > 1 and execution.pipeline_order.is_deferred,
            shown="execution.pipeline.weight_gradients",
        ),
        "{second} is not available with training.skipping, whose timetable has idle ticks"
        " elsewhere",
        "set execution.pipeline.weight_gradients to at_once",
    ),
    Row(
        _STAGES,
        that(
            "",
            "other than the parts of stages",
            lambda config: (
                config.training.skipping.groups
                != config.execution.mesh.stage * config.execution.pipeline_order.chunks
                if getattr(config.training, "skipping", None)
                else False
            ),
            shown="training.skipping.groups",
            needs=("training", "execution"),
        ),
        "{second} must be {first} times execution.pipeline.chunks, the parts through which"
        " micro-batches pass",
        "set training.skipping.groups to that product, or other stages or chunks",
    ),
    Row(
        differs("training.skipping.order", "ascending"),
        ONE_STAGE,
        "{first} exchanges stages, and {second} has one",
        "set execution.mesh.stage to training.skipping.groups, or training.skipping.order to"
        " ascending",
    ),
    Row(
        _SKIPPING,
        that(
            "",
            "`two_pass` on stages, with balancers of whole batches",
            lambda config: (
                config.execution.mesh.stage > 1
                and takes_two_passes(config.model, config.training.accumulated_balance)
            ),
            shown="training.accumulated_balance",
            needs=("model", "training", "execution"),
        ),
        "{second} takes balance losses of whole batches from a pass through all layers of the"
        " stages, and with training.skipping layers see parts of them",
        "set training.accumulated_balance to buffer, or execution.mesh.stage to 1",
    ),
    Row(
        _SKIPPING,
        _DETAILED,
        "{second} observes every layer, and training.skipping leaves out some",
        "set execution.telemetry to brief",
    ),
    Row(
        _SKIPPING,
        _LEVELS,
        "{second} computes as many micro-batches as a step needs, and training.skipping draws"
        " layers for a fixed number",
        "set training.skipping to None, or data.packing to best_fit",
    ),
)
