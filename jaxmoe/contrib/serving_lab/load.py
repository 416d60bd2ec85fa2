# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Sends the workloads of the simulator to an endpoint, and measures what its clients see.

Requests are sent at their times whether or not earlier ones have been answered. A request that
waits for a free connection counts as arrived: a slow server cannot lower its own load.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import queue
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from jaxmoe.contrib.serving_lab.client import Client, RequestOutcome
from jaxmoe.contrib.serving_lab.simulation.measures import Measures, measure_sequences
from jaxmoe.contrib.serving_lab.simulation.workload import Arrival
from jaxmoe.serve.sequence import Sequence as ServedSequence

_THREAD = "load"
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sent:
    """A request and its outcome."""

    arrival: Arrival
    arrived: float
    """Time at which it was due, seconds of `time.monotonic`."""
    outcome: RequestOutcome


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LoadReport:
    """Numbers of one run against an endpoint."""

    requests: int
    """Requests that were sent."""
    failed: int
    """Those without a whole answer."""
    failures: dict[str, int]
    """Their number by reason."""
    prompt_tokens: int
    """Tokens of the prompts that were answered, as the server counts them."""
    cached_tokens: int
    """Those of them that it found in its cache."""
    written_tokens: int
    """Tokens of the answers."""
    measures: Measures | None
    """Latency and goodput of the whole answers; None without any."""


def prompt_of(arrival: Arrival, vocab: int) -> list[int] | str:
    """Return the prompt of a request as an endpoint takes it.

    Equal beginnings of prompts stay equal.

    Args:
        arrival: The request.
        vocab: Ids are taken modulo this number; 0 gives a text with a letter for each id.
    """
    ids = arrival.request.prompt
    if vocab:
        return [id_ % vocab for id_ in ids]
    return "".join(_LETTERS[id_ % len(_LETTERS)] for id_ in ids)


def send_load(
    client: Client,
    arrivals: Sequence[Arrival],
    fields: Mapping[str, Any],
    *,
    vocab: int,
    connections: int,
) -> list[Sent]:
    """Send all requests at their times, and return each with its outcome, in order of the end.

    Args:
        client: Client of the endpoint.
        arrivals: Requests; later turns are sent after the turn before has ended or failed.
        fields: Fields of every body, such as the model.
        vocab: As in `prompt_of`.
        connections: Requests in flight at most.

    An interruption closes the client.
    """
    followers: dict[int, list[Arrival]] = {}
    start = time.monotonic()
    due = list[tuple[float, int, Arrival]]()
    results = list[Sent]()
    endings: queue.SimpleQueue[tuple[Arrival, float, Future[RequestOutcome]]] = queue.SimpleQueue()
    for arrival in arrivals:
        if arrival.after is None:
            due.append((start + arrival.time, arrival.request.id, arrival))
        else:
            followers.setdefault(arrival.after, []).append(arrival)
    heapq.heapify(due)

    def send(arrival: Arrival, arrived: float) -> None:
        future = pool.submit(client.complete, _body(arrival, vocab) | dict(fields))
        future.add_done_callback(lambda done: endings.put((arrival, arrived, done)))

    pool = ThreadPoolExecutor(connections, thread_name_prefix=_THREAD)
    flying = 0
    try:
        while due or flying:
            while due and due[0][0] <= time.monotonic():
                arrived, _, arrival = heapq.heappop(due)
                send(arrival, arrived)
                flying += 1
            try:
                wait = max(due[0][0] - time.monotonic(), 0.0) if due else None
                arrival, arrived, done = endings.get(timeout=wait)
            except queue.Empty:
                continue
            flying -= 1
            results.append(Sent(arrival=arrival, arrived=arrived, outcome=done.result()))
            for later in followers.pop(arrival.request.id, ()):
                heapq.heappush(due, (time.monotonic() + later.time, later.request.id, later))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        if flying:  # after an interruption some still wait for the server
            client.close()
        pool.shutdown()
    return results


def report_load(sent: Sequence[Sent]) -> LoadReport:
    """Return the numbers of a run.

    Args:
        sent: Requests with their outcomes.
    """
    completed = [result for result in sent if not result.outcome.failure]
    failures = collections.Counter(
        result.outcome.failure for result in sent if result.outcome.failure
    )
    return LoadReport(
        requests=len(sent),
        failed=len(sent) - len(completed),
        failures=dict(failures.most_common()),
        prompt_tokens=sum(result.outcome.num_prompt for result in completed),
        cached_tokens=sum(result.outcome.num_cached for result in completed),
        written_tokens=sum(result.outcome.num_written for result in completed),
        measures=measure_sequences(map(_sequence, completed)) if completed else None,
    )


def _body(arrival: Arrival, vocab: int) -> dict[str, Any]:
    body: dict[str, Any] = {
        "prompt": prompt_of(arrival, vocab),
        "max_tokens": arrival.request.sampling.max_tokens,
    }
    return body | ({"user": arrival.request.session} if arrival.request.session else {})


def _sequence(result: Sent) -> ServedSequence:
    """Return a whole answer as a sequence on the client's clock, for the measures."""
    request = result.arrival.request
    outcome = result.outcome
    return ServedSequence(
        request=request,
        order=request.id,
        arrived=result.arrived,
        page_size=1,
        tokens=[*request.prompt, *[0] * outcome.num_written],
        state="finished",
        cached=outcome.num_cached,
        first=outcome.first,
        last=outcome.last,
    )
