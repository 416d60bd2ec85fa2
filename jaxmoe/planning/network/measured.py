# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Replaces the nominal rates of a chip by those of measured links."""

from __future__ import annotations

import dataclasses

from jaxmoe.planning.hardware import Chip
from jaxmoe.resilience.links.table import LinkTable


def linked_chip(chip: Chip, table: LinkTable) -> Chip:
    """Return the chip with the rates of the axes that were measured.

    Args:
        chip: Properties of each device.
        table: Table of `python -m experiments.doctor --links`.
    """
    rates = [(size.axis, table.axis_rate(size.axis)) for size in table.mesh]
    known = tuple((axis, rate) for axis, rate in rates if rate is not None)
    return dataclasses.replace(chip, rates=known)
