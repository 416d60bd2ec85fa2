# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Mixtures of n low-rank additions to one matrix, different for each token.

    together    sum_i f_i (x A_i) B_i                      Gates(is_paired=True)
    apart       sum_i f_i (sum_j f_j x A_j) B_i            Gates(is_paired=False)
    one         (x A_m) B_m                                Members, m given for each token

A [*I n r] and B [n r *O] are the factors, f [n] the weights of a token. Apart, A and B are averaged
each for itself, which has cross terms (Poly, arXiv 2202.13914). With q splits of the inputs and of
the outputs, each split has weights of its own (arXiv 2211.03831):

    h = sum_s sum_j f_sj x_s A_sj        y_t = sum_i f_ti h B_it

All additions are products with one matrix of inner width n r, whatever n. For members, rows are
sorted by member and multiplied by `grouped_matmul`, as rows of experts are: the work is that of
one addition.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import grouped_matmul
from pallas_kernels.jax_versions import match_varying
from sharding import axes as ax
from sharding.products.low_rank import Axes, Dims, Mix

_ROWS = (ax.ACT_BATCH, ax.ACT_SEQ_INNER)


# Not type-checked: tree functions also fill records with shapes, specs and tracers.
@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Gates(Mix):
    """Weights of n additions for each token."""

    values: Float[Array, "B S q n"] | Any
    """f; q is 1 where all inputs and outputs have the same."""
    is_paired: bool = dataclasses.field(default=True, metadata={"static": True})
    """Whether factors are weighted together; False: apart."""
    splits: Any = None
    """Split of each input [*I] and of each output [*O], where q is above 1."""

    def for_matrix(self, inputs: Dims, outputs: Dims) -> Gates:
        """Return the weights for a matrix, whose inputs and outputs must have equal splits."""
        count = self.values.shape[2]
        if count == 1:
            return self
        if self.is_paired or math.prod(inputs) % count or math.prod(outputs) % count:
            raise ValueError(
                f"a matrix from {inputs} to {outputs} cannot be split into {count} equal parts of"
                " its inputs and of its outputs: choose a number of splits that divides both"
            )

        def split_of(dims: Dims) -> Int[Array, ...]:
            places = jnp.arange(math.prod(dims), dtype=jnp.int32)
            return (places // jnp.int32(math.prod(dims) // count)).reshape(dims)

        return dataclasses.replace(self, splits=(split_of(inputs), split_of(outputs)))

    def axes(self, inputs: Axes, outputs: Axes) -> Gates:
        """Return the logical axes of all parts; see the base class."""
        splits = None if self.splits is None else (inputs, outputs)
        return dataclasses.replace(self, values=(*_ROWS, None, None), splits=splits)

    def additions(self, x: Array, down: Array, up: Array) -> Array:
        """Return the mixed additions; see the base class."""
        weights = self.values.astype(jnp.float32)
        if self.splits is None:
            narrow = _into(x, down)
            return _out_of(self._weigh(weights[:, :, 0], narrow).astype(x.dtype), up)
        given, wanted = self.splits
        hidden = jnp.float32(0.0)
        for split in range(weights.shape[2]):
            narrow = _into(_only(x, given, split), down)
            hidden += jnp.einsum("bsn,bsnr->bsr", weights[:, :, split], narrow)
        total = jnp.float32(0.0)
        for split in range(weights.shape[2]):
            mixed = weights[:, :, split, :, None] * hidden[:, :, None, :]
            total += _only(_out_of(mixed.astype(x.dtype), up), wanted, split)
        return total

    def _weigh(self, weights: Array, narrow: Array) -> Array:
        """Return the inner activations [B S n r] that B multiplies, without splits."""
        if not self.is_paired:
            narrow = jnp.einsum("bsn,bsnr->bsr", weights, narrow)[:, :, None, :]
        return weights[..., None] * narrow


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FactorMembers(Mix):
    """The one of n additions that each token has, if any."""

    ids: Int[Array, "B S"] | Any
    """m; a token with another number than 0 to n - 1 has no addition."""

    def for_matrix(self, inputs: Dims, outputs: Dims) -> FactorMembers:
        """Return the same: it does not depend on the matrix."""
        del inputs, outputs
        return self

    def axes(self, inputs: Axes, outputs: Axes) -> FactorMembers:
        """Return the logical axes of all parts."""
        del inputs, outputs
        return FactorMembers(ids=_ROWS)

    def additions(self, x: Array, down: Array, up: Array) -> Array:
        """Return the additions of the tokens' members; see the base class."""
        count, rank = down.shape[-2:]
        ids = self.ids.reshape(-1)
        ids = jnp.where((ids >= 0) & (ids < count), ids, count)  # last, in no group
        order = jnp.argsort(ids, stable=True)
        sizes = jnp.sum(jax.nn.one_hot(ids, count, dtype=jnp.int32), axis=0)
        rows = x.reshape(ids.shape[0], -1)[order]
        narrow = _group(rows, jnp.moveaxis(down, -2, 0).reshape(count, -1, rank), sizes)
        wide = _group(narrow, up.reshape(count, rank, -1), sizes)
        return wide[jnp.argsort(order)].reshape(*x.shape[:2], *up.shape[2:])


def _into(x: Array, down: Array) -> Float[Array, "B S n r"]:
    """Return the product with all A, f32."""
    inputs = down.ndim - 2
    summed = tuple(range(2, 2 + inputs)), tuple(range(inputs))
    return jax.lax.dot_general(x, down, (summed, ((), ())), preferred_element_type=jnp.float32)


def _out_of(narrow: Array, up: Array) -> Float[Array, "B S *O"]:
    """Return the product with all B, summed over members and rank, f32."""
    summed = ((2, 3), (0, 1))
    return jax.lax.dot_general(narrow, up, (summed, ((), ())), preferred_element_type=jnp.float32)


def _only(values: Array, splits: Array, number: int) -> Array:
    """Return values [B S *dims] with zeros outside of one split of the last dimensions."""
    return jnp.where((splits == number)[None, None], values, jnp.zeros_like(values))


def _group(rows: Array, weights: Array, sizes: Array) -> Array:
    rows, weights = match_varying(rows, weights), match_varying(weights, rows)
    return grouped_matmul(rows, weights, sizes)
