# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Requests that arrive over time, with the answers that they will get.

Gaps follow a Gamma distribution: shape 1 is a Poisson process, shape 0.5 is as bursty as the trace
of BurstGPT (arXiv:2401.17644). Lengths are lognormal (an assumption).
Trace files are read by `jaxmoe/contrib/serving_lab/simulation/traces.py`.
"""

from __future__ import annotations

import abc
import array
import dataclasses
from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np

from jaxmoe.catalog import Registry
from jaxmoe.contrib.serving_lab.simulation.traces import Traced, read_trace
from jaxmoe.serve.requests import LatencyObjective, Request, Sampling

VOCAB = 1 << 20
"""Ids are drawn from so many that two prompts agree where they are meant to."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Arrival:
    """A request with its time and its answer."""

    request: Request
    time: float
    """Seconds; for a later turn, seconds after the turn before it has ended."""
    answer: Sequence[int]
    """Tokens that will be written."""
    after: int | None = None
    """Request that has to end first."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Workload(abc.ABC):
    """What all workloads share."""

    name: ClassVar[str]

    rate: float = 4.0
    """Requests per second."""
    requests: int = 300
    """Requests in total."""
    seed: int = 0
    """Seed of times, lengths and tokens."""

    def __post_init__(self) -> None:
        if not self.rate > 0 or self.requests < 1:
            raise ValueError(f"rate={self.rate} and requests={self.requests} must be positive")

    def arrivals(self, objective: LatencyObjective, max_length: int) -> tuple[Arrival, ...]:
        """Return the requests in the order of their ids, with their tokens in tuples.

        Args:
            objective: Promised latency of every request.
            max_length: Tokens of a sequence at most; longer ones are cut.
        """
        arrivals = []
        for arrival in self.stream(objective, max_length):
            request = dataclasses.replace(arrival.request, prompt=tuple(arrival.request.prompt))
            answer = tuple(arrival.answer)
            arrivals.append(dataclasses.replace(arrival, request=request, answer=answer))
        return tuple(arrivals)

    @abc.abstractmethod
    def stream(self, objective: LatencyObjective, max_length: int) -> Iterator[Arrival]:
        """Yield the same requests one by one: in the order of time, later turns behind the first.

        Their tokens are in arrays, which take 8 bytes for each; a tuple of numbers takes 40.

        Args:
            objective: Promised latency of every request.
            max_length: Tokens of a sequence at most; longer ones are cut.
        """


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GammaConfig(Workload):
    """Independent requests in bursts."""

    name: ClassVar[str] = "gamma"

    shape: float = 0.5
    """Shape of the Gamma distribution of the gaps; 1 is a Poisson process."""
    prompt_median: float = 665.0
    """Median of the tokens of a prompt."""
    answer_median: float = 148.0
    """Median of the tokens of an answer."""
    prefixes: int = 0
    """Shared beginnings of prompts, such as system prompts; 0 for none."""
    prefix_tokens: int = 512
    """Tokens of a shared beginning."""

    def stream(self, objective: LatencyObjective, max_length: int) -> Iterator[Arrival]:
        """Yield the requests in the order of their ids."""
        rng = np.random.default_rng(self.seed)
        times = np.cumsum(rng.gamma(self.shape, 1.0 / (self.rate * self.shape), self.requests))
        prompts = _lengths(rng, self.prompt_median, 1.0, self.requests)
        answers = _lengths(rng, self.answer_median, 0.8, self.requests)
        shared = [_tokens(rng, self.prefix_tokens) for _ in range(self.prefixes)]
        for id_ in range(self.requests):
            prefix = shared[int(rng.integers(len(shared)))] if shared else array.array("q")
            prompt = (prefix + _tokens(rng, int(prompts[id_])))[: max_length - 2]
            answer = _tokens(rng, min(int(answers[id_]), max_length - len(prompt)))
            request = _request(id_, prompt, answer, objective)
            yield Arrival(request=request, time=float(times[id_]), answer=answer)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SessionsConfig(Workload):
    """Conversations: each turn repeats what was said and adds to it."""

    name: ClassVar[str] = "sessions"

    turns: int = 4
    """Turns of a conversation."""
    pause: float = 5.0
    """Mean seconds between an answer and the next turn; a tool call or a person."""
    prompt_median: float = 200.0
    """Median of the new tokens of a turn."""
    answer_median: float = 100.0
    """Median of the tokens of an answer."""

    def stream(self, objective: LatencyObjective, max_length: int) -> Iterator[Arrival]:
        """Yield the requests in the order of their ids."""
        rng = np.random.default_rng(self.seed)
        count = -(-self.requests // self.turns)
        starts = np.cumsum(rng.exponential(self.turns / self.rate, count))
        id_ = 0
        for session, start in enumerate(starts):
            said = array.array("q")
            for turn in range(min(self.turns, self.requests - id_)):
                new = _tokens(rng, int(_lengths(rng, self.prompt_median, 0.7, 1)[0]))
                answer = _tokens(rng, int(_lengths(rng, self.answer_median, 0.7, 1)[0]))
                prompt = said + new
                if len(prompt) + len(answer) > max_length:
                    break
                yield Arrival(
                    request=_request(id_, prompt, answer, objective, f"session {session}"),
                    time=float(rng.exponential(self.pause)) if turn else float(start),
                    answer=answer,
                    after=id_ - 1 if turn else None,
                )
                id_ += 1
                said = prompt + answer


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TraceFileConfig(Workload):
    """Requests of a trace file, faster or slower by `rate`."""

    name: ClassVar[str] = "file"

    path: str = ""
    """BurstGPT or Azure csv, or Mooncake jsonl."""

    def stream(self, objective: LatencyObjective, max_length: int) -> Iterator[Arrival]:
        """Yield the requests in the order of their ids."""
        if not self.path:
            raise ValueError("path of the workload is empty: name a trace file")
        traced = read_trace(self.path)[: self.requests]
        if not traced:
            raise ValueError(f"path={self.path} has no request with an answer")
        return self._draw(traced, objective, max_length)

    def _draw(
        self, traced: list[Traced], objective: LatencyObjective, max_length: int
    ) -> Iterator[Arrival]:
        span = traced[-1].time - traced[0].time
        scale = (len(traced) / self.rate) / span if span else 0.0
        rng = np.random.default_rng(self.seed)
        for id_, record in enumerate(traced):
            prompt = _traced_prompt(rng, record)[: max_length - 2]
            answer = _tokens(rng, min(record.answer, max_length - len(prompt)))
            request = _request(id_, prompt, answer, objective, record.session)
            time = (record.time - traced[0].time) * scale
            yield Arrival(request=request, time=time, answer=answer)


WORKLOADS = Registry("workload")


def _lengths(rng: np.random.Generator, median: float, sigma: float, count: int) -> np.ndarray:
    return np.clip(rng.lognormal(np.log(median), sigma, count), 2, 64 * median).astype(int)


def _tokens(rng: np.random.Generator, count: int) -> array.array[int]:
    return array.array("q", rng.integers(VOCAB, size=max(count, 1)).tobytes())


def _traced_prompt(rng: np.random.Generator, record: Traced) -> array.array[int]:
    """Return a prompt whose blocks are equal where the hashes of the trace are."""
    if not record.hashes:
        return _tokens(rng, record.prompt)
    tokens = [
        VOCAB + name * record.block + place
        for name in record.hashes
        for place in range(record.block)
    ]
    return array.array("q", tokens[: max(record.prompt, 1)])


def _request(
    id_: int,
    prompt: Sequence[int],
    answer: Sequence[int],
    objective: LatencyObjective,
    session: str = "",
) -> Request:
    return Request(
        id=id_,
        prompt=prompt,
        sampling=Sampling(max_tokens=len(answer)),
        objective=objective,
        session=session,
    )
