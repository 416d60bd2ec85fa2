# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Plan of an instance whose device is split: lane 0 decodes, lane 1 computes prompts."""

from __future__ import annotations

import itertools

from jaxmoe.contrib.serving_lab.shares import Lane, free_lanes, in_lanes
from jaxmoe.serve.draft import Draft
from jaxmoe.serve.plan import Plan
from jaxmoe.serve.view import InstanceView

DECODE = 0
PREFILL = 1


def plan_lanes(view: InstanceView, decode_share: float, budget: int) -> Plan:
    """Return the work of the lanes that are free.

    Args:
        view: State of the instance.
        decode_share: Share of the device for decoding; prompts have the rest.
        budget: Tokens of the prompts of one step.
    """
    draft = Draft(view)
    free = free_lanes(view.flying, view.facts)
    if DECODE in free:
        draft.decode()
    if PREFILL in free:
        for sequence in itertools.chain(draft.prompts(), view.waiting):
            if not draft.piece(sequence, budget - sum(draft.counts())):
                break
    plan = draft.plan()
    return in_lanes(
        plan,
        Lane(plan.singles, (), DECODE, decode_share),
        Lane((), plan.pieces, PREFILL, 1.0 - decode_share),
    )
