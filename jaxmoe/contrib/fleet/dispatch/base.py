# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Interface of dispatch policies: which instance serves a request."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import ClassVar, Literal

from jaxmoe.serve.facts import WorkPart
from jaxmoe.serve.requests import Request
from jaxmoe.serve.sequence import Sequence
from jaxmoe.serve.view import InstanceView

Role = Literal["both", "prefill", "decode"]


@dataclasses.dataclass(frozen=True, slots=True)
class Route:
    """Where a request is served."""

    prefill: int
    """Instance that computes the prompt."""
    decode: int | None = None
    """Instance that writes the answer; None for the same."""


@dataclasses.dataclass(frozen=True, slots=True)
class Move:
    """A sequence that goes to another instance."""

    id: int
    source: int
    target: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FleetView:
    """State of all instances."""

    now: float
    members: tuple[InstanceView, ...]
    """Instances that take requests; those that drain are not among them."""
    roles: tuple[Role, ...]
    """What each instance does."""
    expected: tuple[int, ...]
    """Sequences that are placed at each instance and still on their way."""
    moves: tuple[Move, ...] = ()
    """Running sequences on their way; until they land the source may go on with them."""
    backlog: tuple[float, ...] = ()
    """Seconds until the link of each member has sent what is queued; zeros if not known."""
    bandwidth: float = math.inf
    """Bytes per second of a link; infinite if not known."""


class RequestDispatcher(abc.ABC):
    """Places requests; subclasses keep what they need to remember."""

    @abc.abstractmethod
    def place(self, request: Request, fleet: FleetView) -> Route | None:
        """Return where a new request is served; None to be asked again when something has ended.

        Later requests wait behind one that has no place.

        Args:
            request: Request.
            fleet: All instances.
        """

    def rebalance(self, fleet: FleetView) -> tuple[Move, ...]:
        """Return the sequences to move now; none by default.

        Args:
            fleet: All instances.
        """
        del fleet
        return ()

    def keeps(self, sequence: Sequence, view: InstanceView) -> bool:
        """Return whether the pages of a sequence that has ended stay as long as others do.

        Args:
            sequence: Sequence with a whole answer.
            view: Instance that has served it.
        """
        del sequence, view
        return True


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DispatchConfig(abc.ABC):
    """A dispatch policy."""

    name: ClassVar[str]
    needs_moves: ClassVar[bool] = False
    """Whether pages must travel between instances."""

    @abc.abstractmethod
    def build(self) -> RequestDispatcher:
        """Return the policy for one fleet."""

    def check(self, *, has_moves: bool) -> None:
        """Raise if the executors of a fleet lack what the policy needs.

        Args:
            has_moves: Whether pages can travel between them.

        Raises:
            ValueError: Names the policy and what is missing.
        """
        if self.needs_moves and not has_moves:
            raise ValueError(
                f"dispatch={self.name!r} needs pages that travel between instances, which this"
                " executor does not have: choose another dispatch policy, such as 'least_loaded'"
            )

    def roles(self, num_instances: int) -> tuple[Role, ...]:
        """Return what each instance does; everything by default.

        Args:
            num_instances: Instances of the fleet.
        """
        return ("both",) * num_instances

    def after_pilot(self, run: Callable[[], Mapping[Role, float]]) -> DispatchConfig:
        """Return the policy for a workload; one that wants a pilot calls for it.

        Args:
            run: Runs the workload once; returns the seconds of work of the instances of each role.
        """
        del run
        return self


def load(view: InstanceView) -> int:
    """Return the tokens that an instance has still to compute, one for each decoding sequence."""
    live = (*view.running, *view.busy, *view.swapped)
    return view.waiting.num_tokens + sum(sequence.left for sequence in live)


def cached_tokens(view: InstanceView, request: Request) -> int:
    """Return the tokens of a prompt that an instance has in its pool.

    Args:
        view: Instance.
        request: Request.
    """
    size = view.facts.page_size
    prompt = request.prompt
    sequence = Sequence(request=request, order=0, arrived=0.0, page_size=size, tokens=prompt)
    return len(view.hits(sequence)) * size


def wait(view: InstanceView, more: int = 0, context: int = 0) -> float:
    """Return the predicted seconds until an instance has computed its prompts and some tokens.

    Args:
        view: Instance; without a model of the time of a step a token counts as a second.
        more: Tokens to compute beyond its own.
        context: Tokens before them that it has in its pool.
    """
    live = (*view.running, *view.busy, *view.waiting)
    parts = [WorkPart(sequence.left, sequence.computed) for sequence in live]
    parts += [WorkPart(more, context)] if more else []
    if view.facts.cost is None:
        return float(sum(part.count for part in parts))
    return view.facts.cost.seconds(parts) if parts else 0.0


def is_at_rest(view: InstanceView) -> bool:
    """Return whether an instance has nothing to compute."""
    return not (view.running or view.busy or view.waiting or view.swapped)


def freest(fleet: FleetView, role: Role) -> int:
    """Return the instance of a role with the fewest sequences, those on their way included."""
    numbers = [number for number, member_role in enumerate(fleet.roles) if member_role == role]
    running = [view.num_running for view in fleet.members]
    return min(numbers, key=lambda i: (running[i] + fleet.expected[i], i))
