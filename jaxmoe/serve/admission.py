# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Which requests an instance takes into its queue."""

from __future__ import annotations

from jaxmoe.serve.facts import Facts
from jaxmoe.serve.queues import Queues
from jaxmoe.serve.requests import Refusal, Request


def refusal_of(request: Request, facts: Facts, queues: Queues) -> Refusal | None:
    """Return why an instance does not queue a request; None if it does.

    Args:
        request: Request.
        facts: Sizes of the instance.
        queues: What it serves already.
    """
    length = len(request.prompt)
    if request.id in queues.sequences:
        message = f"id={request.id} is already being served: give another id"
        return Refusal("duplicate_id", message)
    # A token that is thrown away is never computed; a row of masked diffusion has a place for it.
    has_room = not request.sampling.has_answer and "pages" in facts.capabilities
    most = facts.max_length if has_room else facts.max_length - 1
    if length > most:
        rule = "are held" if has_room else "leave room for an answer"
        message = f"the prompt has {length} tokens; at most {most} {rule}: shorten the prompt"
        return Refusal("context_length_exceeded", message)
    if len(queues.waiting) >= facts.max_waiting:
        return queue_full(facts.max_waiting)
    return None


def queue_full(most: int) -> Refusal:
    """Return the refusal of a request where as many wait as may.

    Args:
        most: Their number.
    """
    return Refusal("queue_full", f"{most} requests are waiting already: try again later")
