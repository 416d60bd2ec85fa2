# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Base class of the dispatcher configs: what the rest of the library asks a dispatcher."""

from __future__ import annotations

import abc
from typing import ClassVar

from jaxtyping import Array, Bool, Int

from sharding.expert_parallel.dispatched import Dispatched, Outgoing
from sharding.expert_parallel.token_shuffle import TokenOrder, check_moved
from sharding.expert_parallel.transport import TransportChoice


class Dispatcher(abc.ABC):
    """How rows reach the experts."""

    __slots__ = ()

    name: ClassVar[str]
    """Name in configs and flags."""
    spreads_experts: ClassVar[bool] = True
    """Each device of the expert axes computes its own experts only."""
    gathers_tokens: ClassVar[bool] = False
    """The devices of the expert axes first share all their tokens."""
    has_whole_tokens: ClassVar[bool] = False
    """Each device of the expert axes has all tokens already, and needs all sums."""
    lends_experts: ClassVar[bool] = False
    """Devices compute experts of other devices, whose weights are sent as they are stored."""
    has_bound: ClassVar[bool] = False
    """Rows beyond a number that follows from those of a dispatch are dropped."""

    @property
    def chunks(self) -> int:
        """Parts of a device's tokens that are sent, computed and returned one after the other."""
        return 1

    def check_tokens(self, num_tokens: int, *, is_token_major: bool, num_devices: int = 1) -> None:
        """Check that the chunks can cut the tokens of a device, and that they can move.

        Args:
            num_tokens: Tokens of a device.
            is_token_major: Whether assignments are in the order of the tokens, K for each.
            num_devices: Devices of the expert axes, between which tokens may move.

        Raises:
            ValueError: They cannot.
        """
        if self.moves_tokens and num_devices > 1:
            check_moved(num_tokens, num_devices, is_token_major=is_token_major)
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

    @property
    def moves_tokens(self) -> bool:
        """Tokens first move to the device that probably holds their experts (`order_tokens`)."""
        return False

    def order_tokens(
        self,
        layer: Int[Array, ""],
        token_ids: Int[Array, " T"],
        token_mask: Bool[Array, " T"],
        below: Int[Array, " T"],
        num_devices: int,
    ) -> TokenOrder:
        """Return the order in which the tokens of this device move, if `moves_tokens`.

        Args:
            layer: Number among the MoE layers.
            token_ids: Vocabulary ids.
            token_mask: False for padding.
            below: Device with most of the token's experts in the MoE layer below; -1 for none.
            num_devices: Devices of the expert axes.
        """
        raise NotImplementedError(self.name)

    def check_model(
        self, *, num_devices: int, num_layers: int, num_experts: int, vocab_size: int
    ) -> None:
        """Check that the dispatcher fits a model on a mesh.

        Args:
            num_devices: Devices of the expert axes.
            num_layers: MoE layers.
            num_experts: E.
            vocab_size: V.

        Raises:
            ValueError: It does not.
        """
        del num_devices, num_layers, num_experts, vocab_size

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
