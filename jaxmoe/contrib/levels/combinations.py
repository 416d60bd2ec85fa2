# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Rows of what does not combine with documents by levels; see `jaxmoe.combinations`."""

from __future__ import annotations

from typing import Final

from jaxmoe.choices import Row, member, that

ROWS: Final = (
    Row(
        member("execution.sequence_parallel", "levels"),
        that(
            "execution.mesh.seq",
            "no power of two",
            lambda seq: seq > 0 and bool(seq & (seq - 1)),
        ),
        "{first} halves the devices of a sequence again and again, and {second} must be a power of"
        " two",
        "set execution.mesh.seq to a power of two, or execution.sequence_parallel to ring",
    ),
)
