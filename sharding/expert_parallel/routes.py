# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Socket `TokenRoute`: tokens that travel between devices before they are dispatched.

    check_model(...), check_tokens(...)        refusals, before anything is traced
    moves(layer, token_ids, ...)               a `TokenMoves`, from what is known before routing
      send(outgoing), undo(y, axes)            tokens with their assignments, and sums back
      measures(...)                            further statistics of the layer
      carried(...)                             what `moves` of the next MoE layer reads

A dispatcher names the member and its argument (`DispatcherTraits.token_route`). Tokens are routed
where they are, before they move.
"""

from __future__ import annotations

import abc
from typing import ClassVar

from jaxtyping import Array, Bool, Float, Int

from sharding.expert_parallel.dispatched import ExpertAxes, Outgoing


class TokenMoves(abc.ABC):
    """Moves of the tokens of one device in one layer."""

    @abc.abstractmethod
    def send(self, outgoing: Outgoing) -> Outgoing:
        """Return the tokens that arrive, as many as are sent, with their assignments.

        Args:
            outgoing: Tokens and token-major assignments of this device.

        Raises:
            ValueError: The assignments are not token-major.
        """

    @abc.abstractmethod
    def undo(self, y: Float[Array, "T D"], axes: ExpertAxes) -> Float[Array, "T D"]:
        """Return rows to the devices and places from which `send` sent them.

        Args:
            y: Rows of the tokens that arrived.
            axes: Mesh axes of the experts.
        """

    @abc.abstractmethod
    def measures(
        self, expert_ids: Int[Array, "T K"], num_experts: int, axes: ExpertAxes
    ) -> dict[str, Array]:
        """Return statistics of this device's tokens, which are added over devices.

        Args:
            expert_ids: Values in [0, E]; E marks an empty slot.
            num_experts: E.
            axes: Mesh axes of the experts.
        """

    @abc.abstractmethod
    def carry_tokens(
        self, expert_ids: Int[Array, "T K"], num_experts: int, axes: ExpertAxes
    ) -> Int[Array, " T"]:
        """Return what the next MoE layer is told of each token; arguments as of `measures`."""


class TokenRoute(abc.ABC):
    """Base class of the members, which are dataclasses with one argument."""

    name: ClassVar[str]
    """Name in the catalogue."""

    @abc.abstractmethod
    def check_model(
        self, *, num_devices: int, num_layers: int, num_experts: int, vocab_size: int
    ) -> None:
        """Check that the member fits a model on a mesh.

        Args:
            num_devices: Devices of the expert axes.
            num_layers: MoE layers.
            num_experts: E.
            vocab_size: V.

        Raises:
            ValueError: It does not.
        """

    @abc.abstractmethod
    def check_tokens(self, num_tokens: int, num_devices: int, *, is_token_major: bool) -> None:
        """Check that the tokens of a device can move to other devices.

        Args:
            num_tokens: T.
            num_devices: P.
            is_token_major: Whether tokens choose experts, K for each.

        Raises:
            ValueError: They cannot.
        """

    @abc.abstractmethod
    def moves(
        self,
        layer: Int[Array, ""],
        token_ids: Int[Array, " T"],
        token_mask: Bool[Array, " T"],
        below: Int[Array, " T"],
        num_devices: int,
    ) -> TokenMoves:
        """Return the moves of the tokens of this device.

        Args:
            layer: Number among the MoE layers.
            token_ids: Vocabulary ids.
            token_mask: False for padding.
            below: `TokenMoves.carry_tokens` of the MoE layer below; -1 for none.
            num_devices: Devices of the expert axes.
        """
