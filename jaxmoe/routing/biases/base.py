# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Protocol of selection biases.

    preference_ti = score_ti + b_i         criterion by which a token's K experts are chosen

Gates use the unbiased score: a bias changes the choice, not the weights. It is router state,
replicated, f32, updated once per optimiser step from the statistics of the whole batch, without
gradient. A bias that depends on the batch being routed differs between scopes, in training only.

To add a bias: see `jaxmoe/routing/biases/__init__.py`.
"""

from __future__ import annotations

from typing import Any, ClassVar, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.routing.base import RouterInputs, RouterStatistics


@runtime_checkable
class SelectionBias(Protocol):
    """A bias config; it has no sizes, so the config is the bias."""

    is_score_correction: ClassVar[bool]
    """DeepSeek-V3's `e_score_correction_bias`: Hugging Face checkpoints of its family hold it."""

    @property
    def sees_others(self) -> bool:
        """Whether in training a token's bias depends on the other tokens of its scope."""
        ...

    def init(self, num_experts: int) -> dict[str, Array]:
        """Return the initial state of one layer; the leaf `bias [E]` is the bias in evaluation."""
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
        """Return the preference, and the additive statistics that `update` needs.

        Args:
            state: State of this layer.
            scores: Unbiased scores (not logarithms), f32.
            inputs: Tokens, with mask and extent.
            top_k: K.
            train: Whether to return statistics; in evaluation the preference depends on no other
                token.
        """
        ...

    def update(
        self, state: Any, statistics: RouterStatistics, step: Array, *, top_k: int
    ) -> dict[str, Array]:
        """Return the state after one optimiser step, from the statistics of its whole batch."""
        ...


class SelectionBiasBase:
    """Base class of bias configs: a bias of zeros that depends on earlier steps alone."""

    __slots__ = ()

    is_score_correction: ClassVar[bool] = False

    @property
    def sees_others(self) -> bool:
        """False: the bias of a step depends on the steps before it."""
        return False

    def init(self, num_experts: int) -> dict[str, Array]:
        """Return a bias of zeros."""
        return {"bias": jnp.zeros((num_experts,), jnp.float32)}
