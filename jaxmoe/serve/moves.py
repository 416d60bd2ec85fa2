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
    one = instance.queues.running[id_]
    if one.is_busy or one.layers_done or request.prompt != tuple(one.tokens):
        raise ValueError(f"request {request.id} does not begin as sequence {id_} does now")
    events = instance.submit(request, now)
    if events or len(instance.queues.running) >= instance.facts.max_running:
        return events
    other = instance.queues.sequences[request.id]
    size = instance.facts.page_size
    computed = min(one.computed, len(one.tokens) - 1)
    forked = instance.pool.fork(one.pages[: num_pages(computed, size)], computed)
    if forked is not None:
        instance.queues.leave(other)
        other.pages, copies = forked
        other.state, other.computed, other.admitted = "running", computed, now
        other.named = computed // size
        instance.copies += copies
        instance.queues.enter(other)
    return ()


def depart(instance: Instance, id_: int) -> Sequence:
    """Mark a running sequence as moving; its pages stay until `departed`.

    Args:
        instance: Source.
        id_: Running sequence between two steps.
    """
    one = instance.queues.running[id_]
    if one.is_busy or one.layers_done:
        raise ValueError(f"sequence {id_} is being computed: move it between two steps")
    instance.queues.leave(one)
    one.state = "moving"
    instance.queues.enter(one)
    return one


def stay(instance: Instance, id_: int) -> None:
    """Take a move back: the sequence runs on where it is."""
    one = instance.queues.moving[id_]
    instance.queues.leave(one)
    one.state = "running"
    instance.queues.enter(one)


def departed(instance: Instance, id_: int) -> None:
    """Give back the pages of a sequence that another instance has received."""
    one = instance.queues.sequences.pop(id_)
    instance.queues.leave(one)
    instance.pool.give(one.pages)
    one.pages = []
    instance.queues.moved_away += 1
    instance.check()


def receive(
    instance: Instance, one: Sequence, pages: list[int] | None = None, named: int = 0
) -> Sequence | None:
    """Take pages for a sequence of another instance, and let it run.

    Args:
        instance: Target.
        one: Sequence as `depart` returned it.
        pages: Pages of this instance that hold its tokens already; taken here when None.
        named: Pages among them that were in the pool under a name.

    Returns:
        The sequence within this instance, whose `pages` the executor fills from those of `one`;
        None, with nothing changed, if a place or pages are lacking.
    """
    facts = instance.facts
    if len(instance.queues.running) >= facts.max_running:
        return None
    if pages is None:
        pages = instance.pool.take(num_pages(one.computed, facts.page_size))
    if pages is None:
        return None
    here = Sequence(
        request=one.request,
        order=instance.queues.submitted,
        arrived=one.arrived,
        page_size=facts.page_size,
        tokens=list(one.tokens),
        state="running",
        pages=pages,
        computed=one.computed,
        named=named,
        preempted=one.preempted,
        cached=one.cached,
        admitted=one.admitted,
        first=one.first,
        last=one.last,
    )
    instance.queues.add(here)
    return here


def transfer_waiting(source: Instance, target: Instance, id_: int) -> None:
    """Move a waiting sequence, which has no pages, to the queue of another instance.

    Args:
        source: Instance in whose queue it waits.
        target: Instance that serves it.
        id_: Waiting sequence.
    """
    one = source.queues.sequences.pop(id_)
    source.queues.leave(one)
    source.queues.moved_away += 1
    one.order = target.queues.submitted
    target.queues.add(one)
