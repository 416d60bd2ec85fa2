# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Products around the gather and the scatter of a stream that is split by positions.

With t devices on the tensor axis, x [B S/t D] and hidden [B S F/t]:

    whole   all-gather, product                      product, reduce-scatter
    ring    t products of S/t rows each, beside      t products of S/t rows each, whose sums travel
            t - 1 permutes of the input to the       in t - 1 permutes to the next device
            next device

Both send (t - 1) / t of B S D values per device. No product of a ring needs the permute that starts
beside it, so that a scheduler can run them at the same time (after T3, arXiv 2401.16677, which does
this in hardware; the decomposition is that of Wang et al., ASPLOS 2023). The gradient of one ring
is the other one, in the opposite direction. The sums of a ring are taken in the order of the
devices, so that results differ from the whole form by rounding.

To add a form: a config that extends `TensorProductsConfig`, its row under `tensor_products` in
`jaxmoe/catalog/executions.py`, a row of FORMS in `tests/sharding/test_collective_products.py`.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Final

import jax
import jax.numpy as jnp
from jaxtyping import Array

Names = tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TensorProductsConfig(abc.ABC):
    """Base class of the forms of products beside a gather or a scatter of positions."""

    name: ClassVar[str]
    """Name in the registry and on the command line."""
    cuts_rows: ClassVar[bool]
    """Whether a product is taken in parts of its rows."""

    @abc.abstractmethod
    def gather_products(self, x: Array, names: Names, multiply: Callable[[Array], Any]) -> Any:
        """Return products of rows that are split over mesh axes; inside a region.

        Args:
            x: Rows of this device [B S/t D].
            names: Mesh axes over which positions are split.
            multiply: Function from rows [B n D] to arrays [B n ...], row by row.
        """

    @abc.abstractmethod
    def scatter_products(
        self, hidden: Array, names: Names, multiply: Callable[[Array], Array]
    ) -> Array:
        """Return the rows of this device of a product that is summed over mesh axes.

        Args:
            hidden: Activations of all rows [B S ...].
            names: Mesh axes over which the addends are split, and the rows of the result.
            multiply: Function from activations [B n ...] to addends [B n D], row by row.
        """


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WholeProductsConfig(TensorProductsConfig):
    """One collective for all rows, before or after one product."""

    name: ClassVar[str] = "whole"
    cuts_rows: ClassVar[bool] = False

    def gather_products(self, x: Array, names: Names, multiply: Callable[[Array], Any]) -> Any:
        """Return the product of all rows, gathered first."""
        return multiply(jax.lax.all_gather(x, names, axis=1, tiled=True))

    def scatter_products(
        self, hidden: Array, names: Names, multiply: Callable[[Array], Array]
    ) -> Array:
        """Return the rows of this device of one product of all rows."""
        return jax.lax.psum_scatter(multiply(hidden), names, scatter_dimension=1, tiled=True)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RingProductsConfig(TensorProductsConfig):
    """Products of the rows of one device at a time, beside permutes to the next device."""

    name: ClassVar[str] = "ring"
    cuts_rows: ClassVar[bool] = True

    def gather_products(self, x: Array, names: Names, multiply: Callable[[Array], Any]) -> Any:
        """Return the products of the rows of one device after the other."""
        devices = jax.lax.axis_size(names)
        rank = jax.lax.axis_index(names)
        rows = x.shape[1]
        result = None
        for number in range(devices):
            following = x if number + 1 == devices else _to_next(x, names)
            products = multiply(x)
            if result is None:
                result = jax.tree.map(lambda y: _room(y, devices), products)
            start = (rank - number) % devices * rows
            result = jax.tree.map(
                lambda all_rows, y, start=start: jax.lax.dynamic_update_slice_in_dim(
                    all_rows, y, start, axis=1
                ),
                result,
                products,
            )
            x = following
        return result

    def scatter_products(
        self, hidden: Array, names: Names, multiply: Callable[[Array], Array]
    ) -> Array:
        """Return the rows of this device, whose sum travels from device to device."""
        devices = jax.lax.axis_size(names)
        rank = jax.lax.axis_index(names)
        rows = hidden.shape[1] // devices

        def part(number: int) -> Array:
            start = (rank - 1 - number) % devices * rows
            return multiply(jax.lax.dynamic_slice_in_dim(hidden, start, rows, axis=1))

        total = part(0)
        for number in range(1, devices):
            arrived = _to_next(total, names)
            total = arrived + part(number)
        return total


WHOLE_PRODUCTS: Final = WholeProductsConfig()
"""The default form."""


def _to_next(x: Array, names: Names) -> Array:
    """Return the array of the device before this one."""
    devices = jax.lax.axis_size(names)
    return jax.lax.ppermute(x, names, [(i, (i + 1) % devices) for i in range(devices)])


def _room(y: Array, devices: int) -> Array:
    """Return zeros for the rows of all devices."""
    return jnp.zeros((y.shape[0], devices * y.shape[1], *y.shape[2:]), y.dtype)
