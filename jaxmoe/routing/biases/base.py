# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Base class of selection biases.

    preference_ti = score_ti + b_i         criterion by which a token's K experts are chosen

Gates use the unbiased score: a bias changes the choice, not the weights. It is router state,
replicated, f32, updated once per optimiser step from the statistics of the whole batch, without
gradient. A bias that depends on the batch being routed differs between scopes, in training only.

To add a bias: see `jaxmoe/routing/biases/__init__.py`.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.routing.base import Arrays, RouterInputs, RouterStatistics


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BiasTraits:
    """Properties of a bias that the rest of the library depends on."""

    sees_others: bool = False
    """In training a token's bias depends on the other tokens of its scope."""
    is_score_correction: bool = False
    """DeepSeek-V3's `e_score_correction_bias`: Hugging Face checkpoints of its family hold it."""


class SelectionBias(abc.ABC):
    """Base class of bias configs; a bias has no sizes, so the config is the bias."""

    __slots__ = ()

    name: ClassVar[str]

    @property
    def traits(self) -> BiasTraits:
        """Properties of the bias."""
        return BiasTraits()

    def init(self, num_experts: int) -> Arrays:
        """Return the state of one layer, zeros; the leaf `bias [E]` is the bias in evaluation."""
        return {"bias": jnp.zeros((num_experts,), jnp.float32)}

    @abc.abstractmethod
    def prefer(
        self,
        state: Arrays,
        scores: Float[Array, "T E"],
        inputs: RouterInputs,
        *,
        top_k: int,
        train: bool,
    ) -> tuple[Float[Array, "T E"], Arrays]:
        """Return the preference, and the additive statistics that `update` needs.

        Args:
            state: State of this layer.
            scores: Unbiased scores (not logarithms), f32.
            inputs: Tokens, with mask and extent.
            top_k: K.
            train: Whether to return statistics; in evaluation the preference depends on no other
                token.
        """

    @abc.abstractmethod
    def update(
        self, state: Any, statistics: RouterStatistics, step: Array, *, top_k: int
    ) -> Arrays:
        """Return the state after one optimiser step, from the statistics of its whole batch."""
