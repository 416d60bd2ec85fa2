# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Interface of scaling policies: what a fleet is to have from now on."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

from jaxmoe.serve.facts import Facts, Part
from jaxmoe.serve.policies.dispatch import FleetView
from jaxmoe.serve.requests import Request


@runtime_checkable
class Hardware(Protocol):
    """Times of one instance on its devices."""

    def seconds(self, parts: Sequence[Part], *, share: float = 1.0, nano_batches: int = 1) -> float:
        """Return the seconds of a step."""
        ...

    def on_chips(self, num_chips: int) -> Any:
        """Return the times on another number of devices."""
        ...

    def loading_seconds(self) -> float:
        """Return the seconds until a new instance has its weights."""
        ...

    def resharding_seconds(self, num_chips: int) -> float:
        """Return the seconds until another number of devices has the weights."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ScalingView:
    """What has happened since the last decision."""

    fleet: FleetView
    arrived: tuple[Request, ...]
    """Requests that have come."""
    seconds: float
    """Time since then."""
    watts: float
    """Mean power of all instances that are on."""
    peak_watts: float
    """Power of all instances, on or off, at the peak."""
    hardware: Any
    """`Hardware` of an instance, at the full clock."""
    num_chips: int
    """Devices of an instance."""
    num_instances: int
    """Instances at most."""

    @property
    def rate(self) -> float:
        """Requests per second."""
        return len(self.arrived) / self.seconds


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What the fleet is to have; None leaves a thing as it is."""

    instances: int | None = None
    num_chips: int | None = None
    """Devices of each instance."""
    clocks: tuple[float, ...] | None = None
    """Clock of each instance that takes requests, as a share of the full one."""
    delay: float = 0.0
    """Seconds until it has it; the fleet serves on as it is until then."""


Scaler = Callable[[ScalingView], Wanted]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ScalingConfig(abc.ABC):
    """A scaling policy."""

    name: ClassVar[str]
    changes_instances: ClassVar[bool] = False
    """Whether instances join and drain."""

    @property
    @abc.abstractmethod
    def seconds(self) -> float:
        """Seconds between two decisions."""

    @abc.abstractmethod
    def build(self) -> Scaler:
        """Return the policy for one fleet."""

    def first(self, num_instances: int) -> int:
        """Return the instances at the beginning; all by default.

        Args:
            num_instances: Instances at most.
        """
        return num_instances


def rate_within(hardware: Hardware, facts: Facts, requests: Sequence[Request]) -> float:
    """Return the requests per second that an instance serves within their objective.

    In a steady state n sequences draw a token each step, and of every A tokens of an answer one
    step also computes a prompt of P. The largest n counts for which a step takes at most `tpot`,
    and together with a whole prompt at most `ttft`; where not even one sequence keeps them, one.

    Args:
        hardware: Times of the instance.
        facts: Its pages and places.
        requests: Requests whose mean lengths and strictest limits count; at least one.

    Returns:
        Requests per second; infinite without limits, because a queue may then grow for ever.
    """
    limits = [one.objective for one in requests if one.objective is not None]
    ttft = min((one.ttft for one in limits), default=math.inf)
    tpot = min((one.tpot for one in limits), default=math.inf)
    if math.isinf(ttft) and math.isinf(tpot):
        return math.inf
    prompt = sum(len(one.prompt) for one in requests) / len(requests)
    answer = sum(one.sampling.max_tokens for one in requests) / len(requests)
    context = int(prompt + answer / 2)

    def step(number: int, more: int = 0) -> float:
        tokens = math.ceil(number * prompt / answer) + more
        return hardware.seconds([Part(1, context)] * number + [Part(tokens)])

    room = int(facts.num_pages * facts.page_size / (prompt + answer))
    low, high = 1, max(min(facts.max_running, room), 1)
    while low < high:
        middle = (low + high + 1) // 2
        is_kept = step(middle) <= tpot and step(middle, int(prompt)) <= ttft
        low, high = (middle, high) if is_kept else (low, middle - 1)
    return low / (answer * step(low))
