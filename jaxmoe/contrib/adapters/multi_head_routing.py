# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Multi-head routing: each task averages n low-rank additions, in q splits (arXiv 2211.03831).

    y_t = x W_t + alpha / r (sum_s sum_j f_sj x_s A_sj) (sum_i f_ti B_it)
    f_s = m_s / sum_j m_sj       m = sigmoid(Z[task]); in training a draw from the relaxed Bernoulli
                                 distribution of temperature 1 with the logits Z

Z [tasks q n] belongs to half a layer. With one split it is Poly (arXiv 2202.13914). Inputs and
outputs of every matrix are cut into q equal splits with weights of their own. A and B are averaged
each for itself, unlike LoRA-Mixer's. A row has one draw in each half of a layer.

    trains=all        logits and additions
    trains=logits     MHR-z: logits alone, of a state whose additions are trained already
    trains=average    MHR-mu: all weights are 1/n, which is one LoRA with the averages as factors

The task of a row is the number of its part in `data:mixture`, or `Batch.extra["task"]` [B S]; rows
without one have `adapter.task`. The products with A and B are taken once for each split.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar, Final, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from jaxmoe.adapters.factors import TRAINED
from jaxmoe.contrib.adapters.mixed import FactorTraits, Made, MixedAdapter, task_ids
from jaxmoe.contrib.adapters.mixtures import Gates
from jaxmoe.declarations import Declaration
from jaxmoe.field_docs import with_field_docs
from jaxmoe.layers.view import HalfInputs, Losses
from sharding import axes as ax
from sharding.constrain import Placement

_ROWS: Final = (ax.ACT_BATCH, ax.ACT_SEQ)


@with_field_docs
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MultiHeadRoutingConfig(MixedAdapter):
    """Low-rank additions averaged for each task (Poly, multi-head routing); all else is frozen."""

    name: ClassVar[str] = "multi_head_routing"
    reads: ClassVar[tuple[str, ...]] = ("task",)
    late_fields: ClassVar[tuple[str, ...]] = ("task",)

    alpha: float = 16.0
    """The mixture is multiplied with alpha / rank."""
    tasks: int = 4
    """Tasks, at least as many as data.mix has parts."""
    splits: int = 1
    """Parts of inputs and outputs with weights of their own; 1 is Poly."""
    trains: Literal["all", "logits", "average"] = "all"
    """Parameters that are trained: all; logits alone (MHR-z); average: additions alone, with equal
    weights (MHR-mu)."""
    logits_learning_rate: float = 100.0
    """Learning rate of the logits, in learning rates of the additions; the paper has 0.1 beside
    1e-3."""
    task: int = 0
    """Task of rows that have none, such as prompts."""

    @property
    def num_tasks(self) -> int:
        """Number of tasks."""
        return self.tasks

    @property
    def factor_traits(self) -> FactorTraits:
        """Properties of the factors of all additions."""
        return FactorTraits(are_trained=self.trains != "logits")

    def check_fields(self) -> None:
        """Raise a ValueError for invalid values."""
        for field in ("tasks", "splits"):
            if getattr(self, field) < 1:
                raise ValueError(f"adapter.{field}={getattr(self, field)} must be at least 1")
        if not 0 <= self.task < self.tasks:
            raise ValueError(
                f"adapter.task={self.task} must be at least 0 and at most {self.tasks - 1}"
                f" (adapter.tasks={self.tasks})"
            )
        if not 0.0 < self.logits_learning_rate < math.inf:
            raise ValueError(
                f"adapter.logits_learning_rate={self.logits_learning_rate} must be above 0"
            )

    def half_parameters(self, width: int) -> Made:
        """Return the logits of half a layer."""
        del width
        if self.trains == "average":
            return {}
        logits = Declaration(
            shape=(self.tasks, self.splits, self.members),
            axes=(ax.RANK, ax.RANK, ax.RANK),
            role="adapter",
            matrix=None,
            init="near_zero",
        )
        rate = self.logits_learning_rate
        return {"logits": (logits, dataclasses.replace(TRAINED, learning_rate_multiplier=rate))}

    def mix(
        self, params: dict[str, Array], half: HalfInputs, placement: Placement, *, train: bool
    ) -> tuple[Gates | None, Losses]:
        """Return the weights of the tokens' tasks; see `MixedAdapter`."""
        if self.trains == "average":
            shape = (*half.token_mask.shape, 1, self.members)
            equal = placement.place(jnp.full(shape, 1.0 / self.members), (*_ROWS, None, None))
            return Gates(values=equal, is_paired=False), {}
        if not params:
            return None, {}
        is_drawn = train and half.key is not None
        key = half.key if is_drawn else {}
        length = jnp.int32(half.token_mask.shape[1])

        def weigh(ids, index, logits, key, *, batch_axes):
            del batch_axes
            drawn = key if is_drawn else None
            row = logits.at[ids].get(mode="fill", fill_value=jnp.nan)  # no such task: no loss
            return task_weights(row, index // length, drawn)

        region = placement.region(
            weigh,
            in_axes=(_ROWS, _ROWS, (None, None, None), () if is_drawn else {}),
            out_axes=(*_ROWS, None, None),
        )
        logits = params["logits"].astype(jnp.float32)
        rows = half.context["index"]
        ids = task_ids(half, self.task)
        values = region(ids, rows, logits, key)
        return Gates(values=values, is_paired=False), {}


def task_weights(
    logits: Float[Array, "B S q n"], rows: Int[Array, "B S"], key: Key[Array, ""] | None
) -> Float[Array, "B S q n"]:
    """Return weights that sum to 1 over the additions.

    Args:
        logits: Logits of the task of each token.
        rows: Number of each token's row; tokens of a row have one draw.
        key: PRNG key of the draw; None takes no draw.
    """
    if key is not None:
        keys = jax.vmap(jax.vmap(lambda row: jax.random.fold_in(key, row)))(rows)
        draw = jax.vmap(
            jax.vmap(lambda key_of_head: jax.random.logistic(key_of_head, logits.shape[2:]))
        )
        logits = logits + draw(keys)
    chosen = jax.nn.sigmoid(logits)
    return chosen / (jnp.sum(chosen, axis=-1, keepdims=True) + jnp.float32(1e-12))
