# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Products with a matrix plus a low-rank one, which is never added to it.

    y = x W + s (x A) B        LoRA (arXiv 2106.09685)

W is a floating matrix or a quantised one. The gradient of A and B needs no array of the shape of W.
Where the inputs of W are cut, those of A are, and x A is a part of a sum, as x W is; where its
outputs are cut, those of B are.

With a `Mix`, A [*I n r] and B [n r *O] are the factors of n additions, and the mix says what a
token has of them; such a matrix has no batch dimensions.
"""

from __future__ import annotations

import abc
import dataclasses
import math
import typing
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import grouped_matmul
from pallas_kernels.backend import Implementation

Axes = tuple[str | None, ...]
Dims = tuple[int, ...]


class Mix(abc.ABC):
    """What each token has of n additions to a matrix: arrays [B S ...], as a pytree."""

    __slots__ = ()

    @abc.abstractmethod
    def for_matrix(self, inputs: Dims, outputs: Dims) -> Mix:
        """Return the mix for a matrix.

        Args:
            inputs: Sizes of its input dimensions.
            outputs: Sizes of its output dimensions.

        Raises:
            ValueError: It does not fit the matrix.
        """

    @abc.abstractmethod
    def axes(self, inputs: Axes, outputs: Axes) -> Mix:
        """Return the logical axes of all parts.

        Args:
            inputs: Logical axes of the inputs of the matrix.
            outputs: Logical axes of its outputs.
        """

    @abc.abstractmethod
    def additions(self, x: Array, down: Array, up: Array) -> Array:
        """Return the additions for the activations of one device, f32.

        Args:
            x: Activations [B S *I].
            down: A [*I n r], in the dtype of the activations.
            up: B [n r *O].
        """


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Awaited:
    """Place of a mixture that the layer of the matrix gives."""


# Not type-checked: tree functions also fill records with shapes, specs and tracers.
@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LowRank:
    """Matrix [*G *I *O], of G batch, I input and O output dimensions, and a low-rank addition."""

    weight: Any
    """W, an array or a quantised matrix."""
    down: Float[Array, "*G *I r"] | Any
    """A."""
    up: Float[Array, "*G r *O"] | Any
    """B."""
    scale: Float[Array, ""] | Any
    """s."""
    mix: Mix | Awaited | None = None
    """How n additions are mixed; None where there is one."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix."""
        return self.weight.shape

    @property
    def ndim(self) -> int:
        """Number of dimensions of the matrix."""
        return self.weight.ndim

    @property
    def num_batch(self) -> int:
        """Number of batch dimensions."""
        return 0 if self.mix is not None else self.down.ndim + self.up.ndim - 2 - self.ndim

    def factors_as(self, dtype: Any) -> LowRank:
        """Return the same with factors of a dtype."""
        return dataclasses.replace(self, down=self.down.astype(dtype), up=self.up.astype(dtype))

    def mixed_by(self, mix: Mix | None) -> LowRank:
        """Return the same with the mixture of the tokens, where it awaits one.

        Args:
            mix: How additions are mixed, or None where nothing mixes them.
        """
        if self.mix is None or mix is None:
            return self
        inputs = self.down.ndim - 2
        return dataclasses.replace(
            self, mix=mix.for_matrix(self.shape[:inputs], self.shape[inputs:])
        )

    def with_values(self, values: Float[Array, "*G r"] | None) -> LowRank:
        """Return W + s A diag(values) B; the same when None."""
        if values is None:
            return self
        wide = values.reshape(values.shape + (1,) * (self.up.ndim - values.ndim))
        return dataclasses.replace(self, up=self.up * wide.astype(self.up.dtype))

    def axes(self, weight: Any, axes: Axes) -> LowRank:
        """Return the logical axes of all parts.

        Args:
            weight: Logical axes of the parts of W.
            axes: Logical axes of the dimensions of W.
        """
        if self.mix is not None:
            inputs = self.down.ndim - 2
            first = axes[:inputs]
            last = axes[inputs:]
            parts = {"down": (*first, None, None), "up": (None, None, *last), "scale": ()}
            return LowRank(weight=weight, mix=self._mix.axes(first, last), **parts)
        inputs = self.down.ndim - 1
        up = (*axes[: self.num_batch], None, *axes[inputs:])
        return LowRank(weight=weight, down=(*axes[:inputs], None), up=up, scale=())

    def merge(self) -> Array:
        """Return W + s A B in the dtype of W, a floating array.

        Raises:
            ValueError: The additions are mixed for each token.
        """
        if self.mix is not None:
            raise ValueError(
                f"a matrix {self.shape} has additions that are mixed for each token, which no one"
                " matrix can be: leave it out of the targets of the adapter"
            )
        batch = tuple(range(self.num_batch))
        product = jax.lax.dot_general(
            self.down.astype(jnp.float32),
            self.up.astype(jnp.float32),
            (((self.down.ndim - 1,), (len(batch),)), (batch, batch)),
            preferred_element_type=jnp.float32,
        )
        added = self.scale * product
        return (self.weight.astype(jnp.float32) + added).astype(self.weight.dtype)

    def additions(self, y: Array, x: Array) -> Array:
        """Return x W + s (x A) B of one device, with the inputs of the matrix last in x.

        Args:
            y: x W.
            x: Activations, in the dtype of the factors.
        """
        if self.mix is not None:
            mix = self._mix
            rows = jax.tree.leaves(self.mix)[0].shape[:2]
            if rows != x.shape[:2]:
                raise ValueError(
                    f"additions are mixed for rows of {rows} tokens, and this product takes"
                    f" {x.shape[:2]} of them at a time: set execution.tensor_products to whole"
                )
            return y + (self.scale * mix.additions(x, self.down, self.up)).astype(y.dtype)
        inputs = self.down.ndim - 1
        summed = tuple(range(x.ndim - inputs, x.ndim)), tuple(range(inputs))
        narrow = jax.lax.dot_general(
            x, self.down, (summed, ((), ())), preferred_element_type=jnp.float32
        ).astype(x.dtype)
        last = ((narrow.ndim - 1,), (0,))
        wide = jax.lax.dot_general(
            narrow, self.up, (last, ((), ())), preferred_element_type=jnp.float32
        )
        return y + (self.scale * wide).astype(y.dtype)

    @property
    def _mix(self) -> Mix:
        """The mixture, which the layer must have given."""
        if isinstance(self.mix, Mix):
            return self.mix
        raise ValueError(
            f"a matrix {self.shape} has additions that are mixed for each token, and this layer"
            " gives no weights for them: leave its roles out of model.adapter.targets.roles"
        )

    @property
    def flat_factors(self) -> tuple[Float[Array, "G k r"], Float[Array, "G r n"]]:
        """A and B of the matrices of groups, inputs and outputs each as one dimension."""
        groups = self.down.shape[0]
        rank = self.down.shape[-1]
        down = self.down.reshape(groups, math.prod(self.down.shape[1:-1]), rank)
        return down, self.up.reshape(groups, rank, math.prod(self.up.shape[2:]))

    def added_to_groups(
        self,
        y: Float[Array, "R n"],
        rows: Float[Array, "R k"],
        group_sizes: Int[Array, " G"],
        implementation: Implementation | None,
    ) -> Float[Array, "R n"]:
        """Return y plus s times the rows multiplied with the factors of their group.

        Args:
            y: Rows times the matrix of their group.
            rows: Rows sorted by group.
            group_sizes: Number of rows of each group.
            implementation: Implementation of `grouped_matmul`.
        """
        down, up = self.flat_factors
        narrow = grouped_matmul(rows, down, group_sizes, implementation=implementation)
        wide = grouped_matmul(narrow, up, group_sizes, implementation=implementation)
        return y + self.scale.astype(y.dtype) * wide
