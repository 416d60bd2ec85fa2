# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Executes the steps of an instance in plain Python, on pages that hold token ids.

The next token is a hash of all tokens that are read through the table of pages: an answer depends
on every page, copy and swap, and on nothing else, so that it can be computed without an instance.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence

from jaxmoe.serve import (
    End,
    EngineStep,
    Event,
    Facts,
    Instance,
    InstanceView,
    Plan,
    Request,
    Result,
)
from jaxmoe.serve.requests import Token
from jaxmoe.serve.sequence import PENDING
from jaxmoe.serve.step import Swap

VOCAB = 13


def next_token(tokens: Sequence[int]) -> int:
    digest = hashlib.blake2b(bytes(token % 251 for token in tokens), digest_size=4).digest()
    return int.from_bytes(digest) % VOCAB


def answer(request: Request, max_length: int) -> list[int]:
    """Return the tokens of a request that is alone and never disturbed."""
    tokens = list(request.prompt)
    for _ in range(request.sampling.max_tokens):
        tokens.append(next_token(tokens))
        if tokens[-1] in request.sampling.stop_ids or len(tokens) >= max_length:
            break
    return tokens[len(request.prompt) :]


class PageExecutor:
    """Memory of an instance; `run` writes tokens to pages and reads them back."""

    def __init__(self, facts: Facts):
        self.facts = facts
        self.memory: dict[tuple[int, int], int] = {}
        self.host: dict[int, list[int]] = {}
        self.named: dict[bytes, list[int]] = {}
        self.num_swapped = 0
        self.begun: dict[int, tuple[int, ...]] = {}
        self.drawn: dict[int, int] = {}

    def run(self, step: EngineStep) -> dict[int, Result]:
        size = self.facts.page_size
        before, self.drawn = self.drawn, {}
        for source, target in step.copies:
            for slot in range(size):
                self.memory[target, slot] = self.memory.get((source, slot), -1)
        for swap in step.out:
            self.swap_out(swap)
        for swap in step.back:
            self.write(swap.pages, 0, self.host.pop(swap.id))
        for id_ in step.dropped:
            del self.host[id_]
        results = {}
        for work in step.works:
            layers = getattr(work, "layers", None)  # of the simulator's instances alone
            if layers is not None:
                if layers[0] == 0:
                    self.begun[work.id] = work.tokens
                assert self.begun[work.id] == work.tokens
            if layers is None or layers[1] == self.facts.num_layers:
                tokens = [before[work.id] if t == PENDING else t for t in work.tokens]
                self.write(work.pages, work.start, tokens)
        for work in step.works:
            if work.draws:
                seen = self.read(work.pages, work.start + len(work.tokens))
                self.drawn[work.id] = next_token(seen)
                results[work.id] = Result(self.drawn[work.id])
            elif work.reads_prompt:
                results[work.id] = Result(-1, prompt=())
        return results

    def swap_out(self, swap: Swap) -> None:
        """Copy pages to host memory, but those of which it has a copy by its name."""
        size = self.facts.page_size
        known = [token for name in swap.names[: swap.kept] for token in self.named[name]]
        rest = self.read(swap.pages[swap.kept :], swap.num_tokens - len(known))
        held = self.host[swap.id] = known + rest
        self.num_swapped += len(swap.pages) - swap.kept
        for number, name in enumerate(swap.names):
            self.named[name] = held[number * size : (number + 1) * size]
        for name in swap.dropped:
            self.named.pop(name, None)

    def read(self, pages: Sequence[int], count: int) -> list[int]:
        size = self.facts.page_size
        return [self.memory[pages[i // size], i % size] for i in range(count)]

    def write(self, pages: Sequence[int], start: int, tokens: Iterable[int]) -> None:
        size = self.facts.page_size
        for place, token in enumerate(tokens, start):
            self.memory[pages[place // size], place % size] = token


class Streams:
    """Events of every request; asserts that nothing follows the end."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, End] = {}

    def add(self, events: Iterable[Event]) -> None:
        for event in events:
            assert event.id not in self.ends, "an event after the end"
            if isinstance(event, End):
                self.ends[event.id] = event
            else:
                written = self.tokens.setdefault(event.id, [])
                assert event.index == len(written)
                written.append(event.result.token)


def serve(
    instance: Instance,
    policy: Callable[[InstanceView], Plan],
    requests: Sequence[tuple[int, Request]],
    *,
    during: Callable[[int], Iterator[int]] = lambda time: iter(()),
    stop: Callable[[Token], bool] = lambda token: False,
    limit: int = 3000,
) -> tuple[Streams, list[Plan]]:
    """Serve requests that arrive at given steps; `during(time)` yields requests to cancel.

    Where the facts allow it, a step starts before the one before is applied. `stop` says which
    tokens end an answer by its text.
    """
    executor, streams, plans = PageExecutor(instance.facts), Streams(), []
    flying: list[tuple[EngineStep, dict[int, Result]]] = []
    queue = sorted(requests, key=lambda pair: pair[0])
    time = 0
    while queue or flying or not instance.is_idle:
        while queue and queue[0][0] <= time:
            streams.add(instance.submit(queue.pop(0)[1], float(time)))
        plan, steps = instance.next_steps(policy, float(time))
        plans.append(plan)
        flying += [(step, executor.run(step)) for step in steps]
        for id_ in during(time):
            streams.add(instance.cancel(id_))
        is_changed = bool(plan.admit or plan.evict or plan.restore)  # then an engine plans again
        if flying and (not (steps or is_changed) or len(flying) > instance.facts.steps_ahead):
            for event in instance.apply(*flying.pop(0), float(time + 1)):
                streams.add([event])
                if isinstance(event, Token) and stop(event):
                    streams.add(instance.stop(event.id))
        instance.check_pages()
        time += 1
        assert time < limit, "requests wait for ever"
    assert instance.pool.num_free == instance.facts.num_pages
    return streams, plans
