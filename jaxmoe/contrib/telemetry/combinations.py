# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Rows of what does not combine with comparisons of gradients; see `jaxmoe.combinations`."""

from __future__ import annotations

from typing import Final

from jaxmoe.choices import Row, above, is_set, member

_COMPARISON: Final = member("parts.*", "gradient_comparison", shown="parts")
_WAY_OUT: Final = "leave gradient_comparison out of parts"

ROWS: Final = (
    Row(
        above("execution.mesh.stage", 1),
        _COMPARISON,
        "{second} compares gradients of whole layers, and {first} separates them",
        _WAY_OUT,
    ),
    Row(
        is_set("rl"),
        _COMPARISON,
        "rl draws the answers of a step by the parameters of the step before, and {second} compares"
        " gradients of rows of data",
        _WAY_OUT,
    ),
)
