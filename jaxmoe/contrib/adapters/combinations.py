# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Rows of what does not combine with these adapters; see `jaxmoe.combinations`."""

from __future__ import annotations

from typing import Final

from jaxmoe.choices import Row, above, differs, equals, is_set, member, trait
from sharding.state_layouts import STATE_LAYOUTS

_SHARDS: Final = member("model.adapter", "mixture_of_shards")
_DRAWS: Final = trait("model.adapter", "backward", "that compares draws")
_GATHERED: Final = tuple(
    name for name, layout in STATE_LAYOUTS.items() if layout.gathered == "step"
)

ROWS: Final = (
    Row(
        is_set("training.average"),
        differs("execution.offload.optimizer"),
        "{first} reads parameters and gradients after each step, and {second} keeps them elsewhere",
        "set execution.offload to None, or leave out training.average",
    ),
    *(
        Row(
            member("model.adapter", "switch_lora"),
            differs(f"execution.precision.{field}", value),
            "{first} adds to the weights at every swap, and {second} rounds away what is small",
            f"set execution.precision.{field} to {value}",
        )
        for field, value in (("weights", "floating"), ("parameters", "float32"))
    ),
    *(
        Row(
            member("model.adapter", "remix"),
            above(f"execution.{field}", 1),
            "{first} compares several passes over whole rows, and {second} cuts them",
            f"set execution.{field} to 1",
        )
        for field in ("mesh.stage", "halves")
    ),
    *(
        Row(
            _DRAWS,
            choice,
            "{first} trains a router by the losses of several draws, and " + reason,
            way_out,
        )
        for choice, reason, way_out in (
            (
                trait("training.gradients", "is_backward", "without a backward pass", value=False),
                "{second} has no backward pass",
                "set training.gradients to backprop",
            ),
            (
                is_set("training.skipping"),
                "training.skipping changes them",
                "set training.skipping to None",
            ),
            (
                is_set("model.loop"),
                "model.loop draws anew in each turn and keeps the last",
                "set model.loop to None",
            ),
        )
    ),
    *(
        Row(
            _SHARDS,
            choice,
            "{first} puts the factors of all layers together before the first, and {second} does"
            " not compute layers from all parameters",
            way_out,
        )
        for choice, way_out in (
            (above("execution.mesh.stage", 1), "set execution.mesh.stage to 1"),
            (equals("execution.rules", *_GATHERED), "set execution.rules to fully_sharded"),
            (
                equals("execution.offload.parameters", "host"),
                "set execution.offload.parameters to device",
            ),
        )
    ),
    *(
        Row(
            member("model.adapter", "shared_store"),
            above(f"execution.mesh.{axis}", 1),
            "{first} has all matrices in one array, whole on each device, and {second} cuts them",
            f"set execution.mesh.{axis} to 1",
        )
        for axis in ("expert", "tensor")
    ),
)
