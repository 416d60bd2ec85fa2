# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Interface of scaling policies: what a fleet is to have from now on."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar, Final, Literal, Protocol, runtime_checkable

from jaxmoe.contrib.fleet.dispatch import FleetView
from jaxmoe.serve.facts import Facts, WorkPart
from jaxmoe.serve.queues import REMEMBERED
from jaxmoe.serve.requests import LatencyObjective, Request
from jaxmoe.serve.view import InstanceView


@runtime_checkable
class Hardware(Protocol):
    """Times of one instance on its devices."""

    def seconds(
        self, parts: Sequence[WorkPart], *, share: float = 1.0, nano_batches: int = 1
    ) -> float:
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
    most_chips: float = math.inf
    """Devices of an instance at most."""

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

Need = Literal["equal_roles", "power", "hardware", "layouts", "objectives"]
"""What a policy may need of a fleet: instances that all do everything; watts and clocks; the time
of a step; layouts on other devices; requests with limits of their own."""

_REASONS: Final[Mapping[Need, str]] = {
    "equal_roles": "lets instances join and drain, which have roles here: choose scaling 'fixed',"
    " or a dispatch policy without roles",
    "power": "needs the power of devices and sets their clocks, which a real engine cannot: choose"
    " 'fixed', 'slo' or 'elastic_experts', or compare it by simulation with experiments.serving"
    " simulate",
    "hardware": "asks how long a step takes: give the engine hardware, such as the MeasuredSteps of"
    " an executor, or choose scaling 'fixed'",
    "layouts": "lays instances out on other devices: give the engine layouts, such as MeshLayouts,"
    " or choose scaling 'slo' or 'fixed'",
    "objectives": "serves requests within scaling.ttft and scaling.tpot, which are infinite: set"
    " one to the seconds that you promise, or choose 'fixed'",
}
"""What a policy does with each, and the way out of a fleet without it."""

_NO_LIMITS = LatencyObjective()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ScalingConfig(abc.ABC):
    """A scaling policy."""

    name: ClassVar[str]

    @property
    def needs(self) -> tuple[Need, ...]:
        """What a fleet has to have for the policy."""
        return ()

    @property
    @abc.abstractmethod
    def seconds(self) -> float:
        """Seconds between two decisions."""

    @abc.abstractmethod
    def build(self) -> Scaler:
        """Return the policy for one fleet."""

    @abc.abstractmethod
    def first(self, num_instances: int) -> int:
        """Return the instances at the beginning.

        Args:
            num_instances: Instances at most.
        """

    def check(self, *, roles: Sequence[str], lacks: Collection[Need] = ()) -> None:
        """Raise if a fleet lacks what the policy needs.

        Args:
            roles: What each instance does.
            lacks: What else the fleet does not have.

        Raises:
            ValueError: Names the policy and what is missing.
        """
        has_roles = set(roles) != {"both"}
        for need, reason in _REASONS.items():
            is_missing = has_roles if need == "equal_roles" else need in lacks
            if is_missing and need in self.needs:
                raise ValueError(f"scaling={self.name!r} {reason}")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RateScalingConfig(ScalingConfig):
    """A policy that compares the rate of requests with that of an instance at their objective."""

    interval: float = 60.0
    """Seconds between two decisions."""
    utilization: float = 0.7
    """Share of the rate at the objective to load an instance with, for bursts."""
    ttft: float = math.inf
    """Seconds to the first token that requests without an objective of their own are promised."""
    tpot: float = math.inf
    """Mean seconds per further token that they are promised."""

    def __post_init__(self) -> None:
        for field in ("interval", "ttft", "tpot"):
            if not (seconds := getattr(self, field)) > 0:
                raise ValueError(f"scaling.{field}={seconds} must be positive seconds")
        if not 0 < self.utilization <= 1:
            raise ValueError(f"scaling.utilization={self.utilization} must lie in (0, 1]")

    @property
    def needs(self) -> tuple[Need, ...]:
        """The time of a step; and requests with limits, where the policy has none itself."""
        is_limited = math.isfinite(min(self.ttft, self.tpot))
        return ("hardware",) if is_limited else ("hardware", "objectives")

    @property
    def seconds(self) -> float:
        """Seconds between two decisions."""
        return self.interval

    def rate(self, hardware: Hardware, view: ScalingView) -> float:
        """Return the requests per second to load an instance with; infinite without requests.

        Args:
            hardware: Times of the instance.
            view: Requests and facts.
        """
        if not view.arrived:
            return math.inf
        promised = LatencyObjective(ttft=self.ttft, tpot=self.tpot)
        facts = view.fleet.members[0].facts
        lengths = [length for member in view.fleet.members for length in answer_lengths(member)]
        rate = rate_within(hardware, facts, view.arrived, promised, lengths=lengths)
        return self.utilization * rate


def answer_lengths(view: InstanceView) -> list[int]:
    """Return the tokens of the answers of an instance that have ended lately.

    The first that end are the short ones: none is known until as many have ended as run.

    Args:
        view: State of the instance.
    """
    if len(view.finished) < min(view.num_running, REMEMBERED):
        return []
    return [o.num_written for o in view.finished if o.request.sampling.has_answer]


def rate_within(
    hardware: Hardware,
    facts: Facts,
    requests: Sequence[Request],
    promised: LatencyObjective = _NO_LIMITS,
    *,
    lengths: Sequence[int] = (),
) -> float:
    """Return the requests per second that an instance serves within their objective.

    In a steady state n sequences draw a token each step, and of every A tokens of an answer one
    step also computes a prompt of P. The largest n counts for which a step takes at most `tpot`,
    and together with a whole prompt at most `ttft`; where not even one sequence keeps them, one.

    Args:
        hardware: Times of the instance.
        facts: Its pages and places.
        requests: Requests whose mean lengths and strictest limits count; at least one.
        promised: Limits of those that bring none.
        lengths: Tokens of answers that have ended. An answer has as many as their mean, or as its
            request allows, which is all that a prompt leaves where a conversation sets no limit.

    Returns:
        Requests per second; infinite without limits, because a queue may then grow for ever.
    """
    limits = [request.objective or promised for request in requests]
    ttft = min(request.ttft for request in limits)
    tpot = min(request.tpot for request in limits)
    if math.isinf(ttft) and math.isinf(tpot):
        return math.inf
    prompt = sum(len(request.prompt) for request in requests) / len(requests)
    mean = sum(lengths) / len(lengths) if lengths else math.inf
    answer = sum(min(request.sampling.max_tokens, mean) for request in requests) / len(requests)
    context = int(prompt + answer / 2)

    def step(number: int, more: int = 0) -> float:
        tokens = math.ceil(number * prompt / answer) + more
        return hardware.seconds([WorkPart(1, context)] * number + [WorkPart(tokens)])

    room = int(facts.num_pages * facts.page_size / (prompt + answer))
    low = 1
    high = max(min(facts.max_running, room), 1)
    while low < high:
        middle = (low + high + 1) // 2
        is_kept = step(middle) <= tpot and step(middle, int(prompt)) <= ttft
        low, high = (middle, high) if is_kept else (low, middle - 1)
    return low / (answer * step(low))
