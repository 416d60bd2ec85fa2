# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Chooses the groups of layers that each micro-batch passes through, in a partial pipeline.

With k of F groups left out, counted without those that are never left out, micro-batch i leaves out

    group j    where (j - i) k mod F < k

Each micro-batch leaves out k groups that lie F / k apart, and the next one leaves out those after
them. So no path leaves out two neighbouring groups if k is at most F / 2, each group is left out
equally often, within 1, in any run of micro-batches, and the work of a stage arrives evenly.

Source: SkipPipe (arXiv 2502.19913), which searches for such paths.

With swapped ends, the second half of the micro-batches pass through the second group before the
first one, and through the last group before the one before it. Source: CheckFree+
(arXiv 2506.15461), so that the groups beside the ends learn what the ends do. It swaps every other
micro-batch; the table of four stages and 16 micro-batches then takes 1.58 times as long as without
swaps, and with one change of the order 1.05 times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from sharding.pipeline import Paths

Order = Literal["ascending", "swapped_ends"]
"""Order of the groups on the second half of the micro-batches: ascending, as on the first; or with
the first two groups and the last two exchanged."""


def choose_paths(
    groups: int,
    micro_batches: int,
    ratio: float,
    never: Sequence[int] = (),
    order: Order = "ascending",
) -> Paths:
    """Return the paths of the micro-batches of a step.

    Args:
        groups: Equal groups of layers.
        micro_batches: Micro-batches of a step.
        ratio: Share of the groups that a micro-batch leaves out, rounded to whole groups.
        never: Groups that no micro-batch leaves out.
        order: Order of the groups on the second half of the micro-batches.

    Raises:
        ValueError: `never` has a group that does not exist, a path would leave out two neighbouring
            groups, a group would be on no path, or there are too few groups to swap.
    """
    if order == "swapped_ends" and groups < 4:
        raise ValueError(
            f"training.skipping.groups={groups} must be at least 4 with"
            " training.skipping.order=swapped_ends, which exchanges the first two groups and the"
            " last two"
        )
    unknown = sorted(group for group in set(never) if not 0 <= group < groups)
    if unknown:
        raise ValueError(
            f"training.skipping.never={tuple(never)} has the group {unknown[0]}, and numbers of"
            f" training.skipping.groups={groups} must be at least 0 and at most {groups - 1}"
        )
    left_out = round(ratio * groups)
    free = [group for group in range(groups) if group not in never]
    if left_out >= max(len(free), 1) or _has_neighbours(free, left_out):
        raise ValueError(
            f"training.skipping.ratio={ratio} leaves out {left_out} of"
            f" training.skipping.groups={groups}, and at most {_most(free)} of the {len(free)} that"
            f" are not in training.skipping.never={tuple(never)} may be left out, no two neighbours"
            " at once: choose a smaller ratio, or fewer groups in never"
        )
    places = {group: place for place, group in enumerate(free)}
    ascending = last = tuple(range(groups))
    if order == "swapped_ends":
        last = (1, 0, *range(2, groups - 2), groups - 1, groups - 2)
    return tuple(
        tuple(
            group
            for group in (last if 2 * micro >= micro_batches else ascending)
            if group not in places or not _is_left_out(places[group], micro, left_out, len(free))
        )
        for micro in range(micro_batches)
    )


def _is_left_out(place: int, micro: int, left_out: int, free: int) -> bool:
    """Return whether a micro-batch leaves out the group at a place among the free ones."""
    return (place - micro) * left_out % free < left_out


def _most(free: list[int]) -> int:
    """Return how many groups a micro-batch may leave out."""
    return max(
        number
        for number in range(max(len(free), 1))
        if not number or not _has_neighbours(free, number)
    )


def _has_neighbours(free: list[int], left_out: int) -> bool:
    """Return whether some path leaves out two neighbouring groups."""
    return any(
        after == before + 1
        and all(_is_left_out(place, micro, left_out, len(free)) for place in (at, at + 1))
        for at, (before, after) in enumerate(zip(free, free[1:], strict=False))
        for micro in range(len(free))
    )
