# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The records between a dispatcher, the experts and the way back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Float, Int

Experts = Callable[[Any, Float[Array, "R D"], Int[Array, " e"]], Float[Array, "R D"]]
"""(weights [e ...], rows sorted by expert, group sizes) -> outputs; rows past the groups give 0."""


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertAxes:
    """Mesh axes over which experts lie, the slowest first; tokens differ on all of them."""

    expert: tuple[str, ...] = ()
    """Experts, E / P on each device: device p holds those from p E / P on."""
    expert_tensor: tuple[str, ...] = ()
    """Hidden units of each expert."""

    @property
    def all(self) -> tuple[str, ...]:
        """All of them."""
        return self.expert + self.expert_tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Dispatched:
    """Rows as the experts of one device read them."""

    rows: Float[Array, "R D"]
    """Sorted by expert; what stands past the groups is read by nobody."""
    group_sizes: Int[Array, " e"]
    """Rows of each expert of `weights`."""
    weights: Any
    """Pytree of arrays [e ...]: of the experts held here, and of borrowed ones behind them."""
    undo: Callable[[Float[Array, "R D"]], Float[Array, "A D"]]
    """Outputs of the rows, back at the device and in the order of the assignments they came from;
    finite where a slot is empty."""
    dropped: Float[Array, " E"]
    """Assignments of this device's tokens that found no place, by expert."""
