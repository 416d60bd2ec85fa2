# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Counts the executions of the collectives of a program."""

import collections
from collections.abc import Iterable

from jaxmoe.planning.hlo import Collective


def counts(found: Iterable[Collective]) -> dict[str, int]:
    """Return the executions of each kind that occurs, such as `{"all-gather": 4}`.

    Args:
        found: Result of `collectives`.

    Raises:
        ValueError: A collective is in a loop with an unknown trip count.
    """
    result: dict[str, int] = collections.Counter()
    for one in found:
        if one.trip_count is None:
            raise ValueError(
                f"{one.name} ({one.kind}) is in a loop with an unknown trip count: give the loop a"
                " constant bound, or count what is outside it"
            )
        result[one.kind] += one.trip_count
    return dict(result)
