# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Rows of what does not combine with these adapters; see `jaxmoe.combinations`."""

from __future__ import annotations

from typing import Final

from jaxmoe.combinations import Row, above, equals, member
from sharding.state_layouts import STATE_LAYOUTS

_SHARDS: Final = member("model.adapter", "mixture_of_shards")
_GATHERED: Final = tuple(
    name for name, layout in STATE_LAYOUTS.items() if layout.gathered == "step"
)

ROWS: Final = (
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
