# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Rows of what does not combine with a lightning indexer; see `jaxmoe.combinations`."""

from __future__ import annotations

from typing import Final

from jaxmoe.choices import Row, above, member

ROWS: Final = (
    Row(
        member("model.mixers.*", "sparse_latent", shown="model.layers.mixer"),
        above("execution.mesh.seq", 1),
        "the indexer of {first} chooses among the keys of whole rows, and {second} cuts them",
        "set execution.mesh.seq to 1",
    ),
)
