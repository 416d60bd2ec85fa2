# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Numbers of an engine: queue, pages, hits, tokens per second, and times of answers."""

from __future__ import annotations

import bisect
import collections
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from jaxmoe.serve.answers import Ended
from jaxmoe.serve.instance import Instance
from jaxmoe.serve.requests import EndReason

_SECONDS = 10.0
"""Time over which rates are taken."""
_ANSWERS = 1000
"""Answers of which the times are kept."""
BOUNDS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
    300.0,
)
"""Seconds up to which the counts of `Times` reach; the last count is of longer ones."""


@dataclasses.dataclass(frozen=True, slots=True)
class Times:
    """Histogram of the times of all answers so far, which can be added."""

    counts: tuple[int, ...] = (0,) * (len(BOUNDS) + 1)
    """Times above the bound before, up to the bound of the same place."""
    seconds: float = 0.0
    """Sum of the times."""

    def __add__(self, other: Times) -> Times:
        """Return the histogram of both."""
        pairs = zip(self.counts, other.counts, strict=True)
        return Times(tuple(map(sum, pairs)), self.seconds + other.seconds)

    def with_time(self, seconds: float) -> Times:
        """Return the histogram with another time.

        Args:
            seconds: The time.
        """
        counts = list(self.counts)
        counts[bisect.bisect_left(BOUNDS, seconds)] += 1
        return Times(tuple(counts), self.seconds + seconds)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EngineMetrics:
    """State of an engine at one time; counters count from its start."""

    num_waiting: int = 0
    """Requests in the queue."""
    num_running: int = 0
    """Requests with pages."""
    num_submitted: int = 0
    """Requests so far; one that moves counts at the first instance that took it alone."""
    num_ended: dict[EndReason, int] = dataclasses.field(default_factory=dict)
    """Ended requests by reason."""
    num_preempted: int = 0
    """Times that a request gave its pages back for another."""
    num_moved: int = 0
    """Requests that went to another instance."""
    pages_moved: int = 0
    """Pages that were copied to another instance."""
    num_steps: int = 0
    """Steps that devices computed."""
    pages_total: int = 0
    """Pages of the pool."""
    pages_used: int = 0
    """Pages that requests hold."""
    pages_cached: int = 0
    """Pages without a request whose content may be used again."""
    tokens_computed: int = 0
    """Tokens of prompts and answers that devices computed."""
    tokens_cached: int = 0
    """Tokens of prompts that were found in the pool."""
    tokens_generated: int = 0
    """Tokens of answers."""
    drafts_checked: int = 0
    """Drafted tokens that devices computed beside those before them."""
    drafts_accepted: int = 0
    """Drafted tokens that the model drew as well."""
    tokens_per_second: float = 0.0
    """Tokens of answers per second, over the last 10 seconds."""
    ttft: tuple[float, ...] = ()
    """Seconds to the first token of the last answers."""
    tpot: tuple[float, ...] = ()
    """Mean seconds per further token of the last answers."""
    times_ttft: Times = Times()
    """Times to the first token of all answers."""
    times_tpot: Times = Times()
    """Mean times per further token of all answers."""
    times_total: Times = Times()
    """Times to the last token of all answers."""

    @property
    def hit_rate(self) -> float:
        """Share of the tokens that were found in the pool."""
        total = self.tokens_cached + self.tokens_computed
        return self.tokens_cached / total if total else 0.0

    @property
    def page_use(self) -> float:
        """Share of the pages that requests hold."""
        return self.pages_used / self.pages_total if self.pages_total else 0.0


def total(members: Sequence[EngineMetrics]) -> EngineMetrics:
    """Return the numbers of several instances as those of one.

    Args:
        members: Numbers of each instance.
    """
    if len(members) == 1:
        return members[0]
    endings: collections.Counter[EndReason] = collections.Counter()
    for member in members:
        endings.update(member.num_ended)
    sums: dict[str, Any] = {}
    for field in dataclasses.fields(EngineMetrics):
        if field.name != "num_ended":
            zero: Any = field.default
            sums[field.name] = sum((getattr(member, field.name) for member in members), start=zero)
    return EngineMetrics(num_ended=dict(endings), **sums)


class Meter:
    """Counts what an engine does; used by its thread alone."""

    def __init__(self) -> None:
        self._num_steps = self._num_generated = self._num_recent = 0
        self._ttft: collections.deque[float] = collections.deque(maxlen=_ANSWERS)
        self._tpot: collections.deque[float] = collections.deque(maxlen=_ANSWERS)
        self._times: dict[str, Times] = collections.defaultdict(Times)
        self._recent: collections.deque[tuple[float, int]] = collections.deque()
        self._begun = math.inf

    def step(self, num_generated: int, now: float) -> None:
        """Count a step.

        Args:
            num_generated: Tokens that it added to answers.
            now: Seconds.
        """
        self._begun = min(self._begun, now)
        self._num_steps += 1
        self._num_generated += num_generated
        self._num_recent += num_generated
        self._recent.append((now, num_generated))

    def end(self, ending: Ended) -> None:
        """Count the times of an answer that is whole."""
        if ending.reason not in ("stop", "length"):
            return
        if ending.ttft is None:
            return
        self._ttft.append(ending.ttft)
        self._count("ttft", ending.ttft)
        if ending.tpot is not None:
            self._tpot.append(ending.tpot)
            self._count("tpot", ending.tpot)
        num_later = max(ending.num_generated - 1, 0) * (ending.tpot or 0.0)
        self._count("total", ending.ttft + num_later)

    def metrics(self, instance: Instance, now: float) -> EngineMetrics:
        """Return the numbers as they are.

        Args:
            instance: Instance of the engine.
            now: Seconds.
        """
        while self._recent and self._recent[0][0] < now - _SECONDS:
            self._num_recent -= self._recent.popleft()[1]
        queues = instance.queues
        pool = instance.pool
        seconds = min(max(now - self._begun, 1e-3), _SECONDS)
        return EngineMetrics(
            num_waiting=len(queues.waiting) + len(queues.swapped),
            num_running=len(queues.running) + len(queues.moving),
            num_submitted=queues.submitted - queues.moved_here,
            num_ended=dict(queues.ended),
            num_preempted=instance.num_preempted,
            num_moved=queues.moved_away,
            num_steps=self._num_steps,
            pages_total=pool.size,
            pages_used=pool.size - pool.num_free,
            pages_cached=pool.num_cached,
            tokens_computed=instance.num_computed,
            tokens_cached=instance.num_cached,
            tokens_generated=self._num_generated,
            drafts_checked=instance.num_guessed,
            drafts_accepted=instance.num_accepted,
            tokens_per_second=self._num_recent / seconds,
            ttft=tuple(self._ttft),
            tpot=tuple(self._tpot),
            times_ttft=self._times["ttft"],
            times_tpot=self._times["tpot"],
            times_total=self._times["total"],
        )

    def _count(self, name: str, seconds: float) -> None:
        self._times[name] = self._times[name].with_time(seconds)
