# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Plan of an instance whose device is split: lane 0 decodes, lane 1 computes prompts."""

from __future__ import annotations

from jaxmoe.contrib.serving_lab.shares import SharedDraft
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
    draft = SharedDraft(view)
    if DECODE in view.free_lanes:
        for sequence in draft.decoding():
            draft.single(sequence, DECODE)
    if PREFILL in view.free_lanes:
        for sequence in (*draft.prompts(), *view.waiting):
            if not draft.piece(sequence, budget - draft.tokens(PREFILL), PREFILL):
                break
    return draft.shared_plan({DECODE: decode_share, PREFILL: 1.0 - decode_share})
