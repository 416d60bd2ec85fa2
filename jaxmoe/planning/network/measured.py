# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Seconds of a step's messages by measured links, instead of those of the chip's table."""

from __future__ import annotations

from jaxmoe.planning.traffic import Traffic
from jaxmoe.resilience.links.table import LinkTable


def measured_seconds(one: Traffic, table: LinkTable) -> float | None:
    """Return the seconds of the messages of one reason in sequence, as `step_time.seconds_of`.

    Several axes together are as slow as the slowest of them.

    Args:
        one: Bytes and messages to send.
        table: Table of `python -m experiments.doctor --links`.

    Returns:
        The seconds; None if an axis was not measured.
    """
    rates = [table.axis_rate(axis) for axis in one.axes]
    known = [rate for rate in rates if rate is not None]
    if len(known) < len(rates) or not known:
        return None
    latency = max(rate.latency for rate in known)
    return one.messages * latency + one.bytes / min(rate.bandwidth for rate in known)
