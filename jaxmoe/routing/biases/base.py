# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The protocol of selection biases.

    preference_ti = score_ti + b_i         what the K best experts of a token are chosen by

The gates see the unbiased score: a bias changes who is chosen and never how much an expert counts.
It is state, replicated, f32, updated once per optimiser step from the statistics of the whole
batch, and no gradient passes through it. One that looks at the batch which it routes returns
another bias for each scope, in training only.

To add a bias: see `jaxmoe/routing/biases/__init__.py`.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from jaxtyping import Array, Float

from jaxmoe.routing.base import RouterInputs, RouterStatistics


@runtime_checkable
class SelectionBias(Protocol):
    """A bias config: it has no sizes of its own, so the config is the bias."""

    @property
    def sees_others(self) -> bool:
        """In training a token's bias depends on the other tokens of its scope."""
        ...

    def init(self, num_experts: int) -> dict[str, Array]:
        """State of one layer."""
        ...

    def prefer(
        self,
        state: dict[str, Array],
        scores: Float[Array, "T E"],
        inputs: RouterInputs,
        *,
        top_k: int,
        train: bool,
    ) -> tuple[Float[Array, "T E"], dict[str, Array]]:
        """What to choose by, and the additive statistics that `update` needs.

        Args:
            state: of this layer.
            scores: unbiased and linear, f32.
            inputs: for the mask and the extent.
            top_k: K.
            train: in evaluation the preference depends on no other token.
        """
        ...

    def update(
        self, state: Any, statistics: RouterStatistics, step: Array, *, top_k: int
    ) -> dict[str, Array]:
        """The state after one optimiser step, from the statistics of its whole batch."""
        ...
