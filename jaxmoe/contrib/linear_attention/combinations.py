# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Rows of what does not combine with lightning attention; see `jaxmoe.combinations`."""

from __future__ import annotations

from typing import Final

from jaxmoe.choices import Row, is_set, that

ROWS: Final = (
    Row(
        is_set("model.loop"),
        that(
            "model.mixers.*",
            "with decay_layers",
            lambda mixer: getattr(mixer, "decay_layers", None) is not None,
            "model.layers.mixer",
        ),
        "model.loop calls layers several times, and the decay of {second} depends on the number of"
        " the layer",
        "set decay_layers of the mixer to None, or leave model.loop out",
    ),
)
