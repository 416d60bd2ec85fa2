# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Records that go into a dispatcher (`Outgoing`) and come out of it (`Dispatched`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_swiglu import RowIndices
from sharding.assignments import Assignments
from sharding.expert_parallel.permute import repeat_tokens

Experts = Callable[..., Float[Array, "R D"]]
"""(weights [e ...], rows sorted by expert [R D], group sizes [e], gates of the rows [R]) -> outputs
times gates [R D]; rows past the groups give 0. With `indices` they take the tokens [T D] in place
of the rows, and return the sums of their outputs [T D]."""


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertAxes:
    """Mesh axes over which experts are sharded, the slowest first; tokens differ on all of them."""

    expert: tuple[str, ...] = ()
    """Axes over the experts: device p holds the E / P experts from p E / P on."""
    expert_tensor: tuple[str, ...] = ()
    """Axes over the hidden units of each expert."""

    @property
    def all(self) -> tuple[str, ...]:
        """Both groups of axes, in order."""
        return self.expert + self.expert_tensor

    def experts_held(self, num_experts: int) -> int:
        """Return e = E / P; call it inside a region.

        Args:
            num_experts: E.

        Raises:
            ValueError: P does not divide E.
        """
        devices = jax.lax.axis_size(self.expert)
        if num_experts % devices:
            raise ValueError(
                f"model.moe.num_experts={num_experts} must be divisible by the {devices} devices of"
                f" the expert axes {self.expert}: choose a multiple, or fewer devices for experts"
            )
        return num_experts // devices


@dataclasses.dataclass(frozen=True, slots=True)
class Outgoing:
    """Tokens of one device with their assignments: the argument of every dispatcher."""

    x: Float[Array, "T D"]
    """Tokens of this device; of all devices of `axes` if the dispatcher gathers tokens."""
    assignments: Assignments
    """Assignments of these tokens; the experts of one token differ."""
    weights: Any
    """Pytree of arrays [e ...]: weights of the experts held here."""
    num_experts: int
    """E."""
    axes: ExpertAxes
    """Mesh axes over which experts are sharded."""
    reads_tokens: bool = False
    """Whether experts read tokens by index where their rows are of this device's tokens."""

    @property
    def rows(self) -> Float[Array, "A D"]:
        """One row for each assignment, in the order of the assignments."""
        if self.assignments.top_k is not None:
            return repeat_tokens(self.x, self.assignments.top_k)
        return self.x[self.assignments.token_ids]

    @property
    def gates(self) -> Float[Array, "A 1"]:
        """Gate of each assignment, as a row."""
        return self.assignments.gates[:, None]

    @property
    def expert_ids(self) -> Int[Array, " A"]:
        """Expert of each assignment; E where the slot is empty."""
        return self.assignments.expert_ids

    def indices_of(self, slots: Int[Array, " R"], places: Int[Array, " A"]) -> RowIndices | None:
        """Return the tokens of sorted rows; None where experts read rows.

        Args:
            slots: Assignment of each row; A or more where the row is in no group.
            places: Row of each assignment; one past the groups where it has none.
        """
        top_k = self.assignments.top_k
        if top_k is None or not self.reads_tokens:
            return None
        last = jnp.int32(self.x.shape[0] - 1)
        sources = jnp.minimum(slots.astype(jnp.int32) // jnp.int32(top_k), last)
        return RowIndices(sources, places.reshape(-1, top_k))

    def most_for_groups(self, num_groups: int) -> int:
        """Return the largest number of rows that can go to one device, min(A, T num_groups).

        Args:
            num_groups: Experts on that device; a token goes to each at most once.
        """
        return min(self.expert_ids.shape[0], self.x.shape[0] * num_groups)

    def none_dropped(self) -> Float[Array, " E"]:
        """Return the drop counts of a dropless dispatcher."""
        return jnp.zeros((self.num_experts,), jnp.float32)


@dataclasses.dataclass(frozen=True, slots=True)
class Dispatched:
    """Rows as the experts of one device read them."""

    rows: Float[Array, "R D"]
    """Rows sorted by expert; those past the groups are never read."""
    group_sizes: Int[Array, " e"]
    """Rows of each expert of `weights`."""
    gates: Float[Array, " R"]
    """Gate of each row, f32."""
    weights: Any
    """Pytree of arrays [e ...]: the experts held here, followed by borrowed ones."""
    undo: Callable[[Float[Array, "R D"]], Float[Array, "A D"]]
    """Returns outputs to the device and the order of the assignments; 0 in empty slots."""
    dropped: Float[Array, " E"]
    """Dropped assignments of this device's tokens, by expert."""
    indices: RowIndices | None = None
    """Tokens of the rows, where experts read the tokens themselves."""
