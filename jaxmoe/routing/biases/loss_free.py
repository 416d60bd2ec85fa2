# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Loss-free balancing: each expert's bias follows its load.

    b_i += rate * sign(mean(counts) - counts_i)

Source: arXiv 2408.15664, algorithm 1.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.routing.base import RouterInputs, RouterStatistics


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LossFreeConfig:
    """A bias per expert that rises while the expert has too few tokens, and falls otherwise."""

    name: ClassVar[str] = "loss_free"

    rate: float = 1e-3
    """Step of the bias; tuned by its authors for scores in [0, 1]."""

    def __post_init__(self):
        if not self.rate >= 0.0:
            raise ValueError(f"bias.rate={self.rate} must be 0 or above")

    @property
    def sees_others(self) -> bool:
        """The bias of a step comes from the steps before it."""
        return False

    def init(self, num_experts: int) -> dict[str, Array]:
        """No bias."""
        return {"bias": jnp.zeros((num_experts,), jnp.float32)}

    def prefer(
        self,
        state: dict[str, Array],
        scores: Float[Array, "T E"],
        inputs: RouterInputs,
        *,
        top_k: int,
        train: bool,
    ) -> tuple[Float[Array, "T E"], dict[str, Array]]:
        """Scores plus bias."""
        del inputs, top_k, train
        return jax.lax.stop_gradient(scores) + state["bias"][None, :], {}

    def update(
        self, state: Any, statistics: RouterStatistics, step: Array, *, top_k: int
    ) -> dict[str, Array]:
        """One step towards the even load."""
        del step, top_k
        counts = statistics.counts
        return {"bias": state["bias"] + self.rate * jnp.sign(counts.mean() - counts)}
