# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Defines the socket `Carry`: arrays that a part of a layer hands to the next layer.

A mixer, a feed-forward or a residual names its arrays in `carries`. Before the first layer each is
filled with one number; from then on `stream.carry[name]` holds what the last layer wrote. A mixer
and a feed-forward read `carry` among their inputs, and return in `carry` of their outputs the
arrays that change; a residual reads and writes the stream itself.

    {"router_logits": CarriedArray((num_routed,))}        ->  carry["router_logits"] [B S E]

Members that name the same array share it, and must describe it alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jaxtyping import Array

from sharding import axes as ax

if TYPE_CHECKING:
    from jaxmoe.execution import ExecutionConfig
    from jaxmoe.layers.context import LayerContext


@dataclasses.dataclass(frozen=True, slots=True)
class CarriedArray:
    """Shape, layout and first value of an array [B S ...] that flows from layer to layer."""

    features: tuple[int, ...] = ()
    """Sizes of the dimensions after B and S."""
    axes: tuple[str | None, ...] = ()
    """Logical axes of the features; none of them is split when empty."""
    positions: str = ax.ACT_SEQ
    """Logical axis of S."""
    dtype: Any = jnp.float32
    """Dtype; the compute dtype when None."""
    fill: int = 0
    """Value of all entries before the first layer."""

    @property
    def is_by_token(self) -> bool:
        """Whether it is split by tokens as the residual stream is."""
        return self.positions == ax.ACT_SEQ


class Carry:
    """Base class of the configs whose modules may hand arrays to the next layer."""

    __slots__ = ()

    def carries(self, context: LayerContext, execution: ExecutionConfig) -> dict[str, CarriedArray]:
        """Return the arrays that flow from layer to layer, by name.

        Args:
            context: Model-wide numbers.
            execution: How the layer is computed, on the current mesh.
        """
        del context, execution
        return {}


def carried_arrays(
    context: LayerContext, execution: ExecutionConfig, members: Iterable[Carry] | None = None
) -> dict[str, CarriedArray]:
    """Return all arrays that flow from layer to layer, by name.

    Args:
        context: Model-wide numbers.
        execution: How the layers are computed, on the current mesh.
        members: Configs of the layers; those of the whole model when None.

    Raises:
        ValueError: Two members describe an array of one name differently.
    """
    arrays: dict[str, CarriedArray] = {}
    if members is None:
        members = [*context.mixers, *context.feed_forwards, context.residual]
    for member in members:
        for name, array in member.carries(context, execution).items():
            if arrays.setdefault(name, array) != array:
                raise ValueError(
                    f"model.layers: two kinds of layers carry {name!r}, once as {arrays[name]} and"
                    f" once as {array}: make them equal"
                )
    return arrays


def initial_carry(
    arrays: dict[str, CarriedArray], shape: tuple[int, ...], execution: ExecutionConfig
) -> dict[str, Array]:
    """Return `Stream.carry` before the first layer.

    Args:
        arrays: Arrays that flow from layer to layer.
        shape: B and S.
        execution: Placement.
    """
    carry = {}
    for name, array in arrays.items():
        dtype = execution.precision.compute_dtype if array.dtype is None else array.dtype
        filled = jnp.full((*shape, *array.features), array.fill, dtype)
        axes = array.axes or (None,) * len(array.features)
        carry[name] = execution.placement.place(filled, (ax.ACT_BATCH, array.positions, *axes))
    return carry
