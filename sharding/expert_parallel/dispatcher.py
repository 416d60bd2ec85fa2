# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Base class of the dispatcher configs: what the rest of the library asks a dispatcher."""

from __future__ import annotations

import abc
import dataclasses
from typing import ClassVar

from sharding.expert_parallel.dispatched import Dispatched, Outgoing
from sharding.expert_parallel.transport import TransportChoice


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DispatcherTraits:
    """Properties of a dispatcher that the rest of the library depends on."""

    spreads_experts: bool = True
    """Each device of the expert axes computes its own experts only."""
    gathers_tokens: bool = False
    """The devices of the expert axes first share all their tokens."""
    has_whole_tokens: bool = False
    """Each device of the expert axes has all tokens already, and needs all sums."""
    lends_experts: bool = False
    """Devices compute experts of other devices, whose weights are sent as they are stored."""
    has_bound: bool = False
    """Rows beyond a number that follows from those of a dispatch are dropped."""
    token_route: tuple[str, str] | None = None
    """Member of `TokenRoute` by which tokens first move, and its argument; None: they stay."""


class Dispatcher(abc.ABC):
    """How rows reach the experts."""

    __slots__ = ()

    name: ClassVar[str]
    """Name in configs and flags."""

    @property
    def traits(self) -> DispatcherTraits:
        """Properties of the dispatcher."""
        return DispatcherTraits()

    @property
    def chunks(self) -> int:
        """Parts of a device's tokens that are sent, computed and returned one after the other."""
        return 1

    @property
    def keeps_rows(self) -> bool:
        """Whether the backward pass finds the rows at their experts, or dispatches again."""
        return True

    def check_tokens(self, num_tokens: int, *, is_token_major: bool) -> None:
        """Check that the chunks can cut the tokens of a device.

        Args:
            num_tokens: Tokens of a device.
            is_token_major: Whether assignments are in the order of the tokens, K for each.

        Raises:
            ValueError: They cannot.
        """
        where = f"execution.dispatcher.num_chunks={self.chunks}"
        if self.chunks == 1:
            return
        if not is_token_major:
            raise ValueError(
                f"{where} cuts assignments by token, and this router gives them by expert: set it"
                " to 1"
            )
        if num_tokens % self.chunks:
            raise ValueError(
                f"{where} must divide the tokens of a device ({num_tokens}): choose a divisor, 1"
                " for all at once"
            )

    @abc.abstractmethod
    def dispatch(self, outgoing: Outgoing) -> Dispatched:
        """Send each row to a device that computes its expert. Called inside a region.

        Args:
            outgoing: Tokens, assignments and weights of this device.
        """

    def transport_choice(self) -> TransportChoice | None:
        """Return the transport of rows between devices and its reason; None if none travel."""
        return None

    def arriving_places(self, *, sent: float, worst: float) -> float:
        """Return the rows for which a device allocates memory on arrival.

        Args:
            sent: Rows that a device sends: T K.
            worst: Largest number of rows that can arrive: P T min(K, E / P).
        """
        del sent
        return worst
