# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Shares and moves the pages of running sequences: forks, and moves to another instance."""

from __future__ import annotations

from jaxmoe.serve.blocks import num_pages
from jaxmoe.serve.instance import Instance
from jaxmoe.serve.requests import Event, Request
from jaxmoe.serve.sequence import Sequence


def fork(instance: Instance, id_: int, request: Request, now: float) -> tuple[Event, ...]:
    """Submit a request that begins with the tokens of a running one, and share its pages.

    Args:
        instance: Instance that runs the sequence.
        id_: Running sequence between two steps.
        request: Its `prompt` is the prompt and the written tokens of that sequence.
        now: Seconds on the instance's clock.

    Returns:
        Nothing, or the end of the stream if the request is refused. Without a place or a free page
        the request waits as any other.

    Raises:
        ValueError: The request does not begin as the sequence does.
    """
    sequence = instance.queues.running[id_]
    if sequence.is_busy or request.prompt != tuple(sequence.tokens):
        raise ValueError(f"request {request.id} does not begin as sequence {id_} does now")
    events = instance.submit(request, now)
    if events or len(instance.queues.running) >= instance.facts.max_running:
        return events
    copy = instance.queues.sequences[request.id]
    size = instance.facts.page_size
    computed = min(sequence.computed, len(sequence.tokens) - 1)
    forked = instance.pool.fork(sequence.pages[: num_pages(computed, size)], computed)
    if forked is not None:
        instance.queues.leave(copy)
        copy.pages, copies = forked
        copy.state = "running"
        copy.computed = computed
        copy.admitted = now
        copy.named = computed // size
        instance.copies += copies
        instance.queues.enter(copy)
    return ()


def depart(instance: Instance, id_: int) -> Sequence:
    """Mark a running sequence as moving; its pages stay until `release_departed`.

    Args:
        instance: Source.
        id_: Running sequence between two steps.
    """
    sequence = instance.queues.running[id_]
    if sequence.is_busy or sequence.num_pending:
        raise ValueError(f"sequence {id_} is being computed: move it between two steps")
    instance.queues.leave(sequence)
    sequence.is_leaving = False
    sequence.state = "moving"
    instance.queues.enter(sequence)
    return sequence


def stay(instance: Instance, id_: int) -> None:
    """Take a move back: the sequence runs on where it is."""
    sequence = instance.queues.moving[id_]
    instance.queues.leave(sequence)
    sequence.state = "running"
    instance.queues.enter(sequence)


def release_departed(instance: Instance, id_: int) -> None:
    """Give back the pages of a sequence that another instance has received."""
    sequence = instance.queues.sequences.pop(id_)
    instance.queues.leave(sequence)
    instance.pool.give(sequence.pages)
    sequence.pages = []
    instance.queues.moved_away += 1
    instance.check()


def receive(
    instance: Instance, sequence: Sequence, pages: list[int] | None = None, num_named: int = 0
) -> Sequence | None:
    """Take pages for a sequence of another instance, and let it run.

    Args:
        instance: Target.
        sequence: Sequence as `depart` returned it.
        pages: Pages of this instance that hold its tokens already; taken here when None.
        num_named: Pages among them that were in the pool under a name.

    Returns:
        The sequence within this instance, whose `pages` the executor fills from those of `one`;
        None, with nothing changed, if a place or pages are lacking.
    """
    facts = instance.facts
    if len(instance.queues.running) >= facts.max_running:
        return None
    if pages is None:
        pages = instance.pool.take(num_pages(sequence.computed, facts.page_size))
    if pages is None:
        return None
    arrived = Sequence(
        request=sequence.request,
        order=instance.queues.submitted,
        arrived=sequence.arrived,
        page_size=facts.page_size,
        tokens=list(sequence.tokens),
        state="running",
        pages=pages,
        computed=sequence.computed,
        named=num_named,
        preempted=sequence.preempted,
        cached=sequence.cached,
        admitted=sequence.admitted,
        first=sequence.first,
        last=sequence.last,
        scores=list(sequence.scores),
        state_sum=sequence.state_sum,
    )
    instance.queues.add(arrived)
    instance.queues.moved_here += 1
    return arrived


def transfer_waiting(source: Instance, target: Instance, id_: int) -> None:
    """Move a waiting sequence, which has no pages, to the queue of another instance.

    Args:
        source: Instance in whose queue it waits.
        target: Instance that serves it.
        id_: Waiting sequence.
    """
    sequence = source.queues.sequences.pop(id_)
    source.queues.leave(sequence)
    source.queues.moved_away += 1
    sequence.order = target.queues.submitted
    target.queues.add(sequence)
    target.queues.moved_here += 1
