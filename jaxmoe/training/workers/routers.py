# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Brings the state of routers, such as expert biases, together at an exchange.

A router's state follows from the routing statistics of the steps. Biases of workers that have
drifted apart are not averaged: the statistics of each step since the last exchange are added up
over the workers, and the updates of these steps are done once more, from the state of the last
exchange. The result is that of one large batch with the same statistics.
"""

from __future__ import annotations

import typing

from flax import struct

from jaxmoe.routing import RouterStatistics


@typing.no_type_check
@struct.dataclass
class Past:
    """Routing statistics of the last steps."""

    statistics: RouterStatistics
    """Of each worker and step, [R H L ...]; step t is at t mod H."""
