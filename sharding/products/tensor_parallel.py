# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism: layout of each activation, and a split vocabulary.

With t devices on the tensor axis (Megatron-LM, arXiv 1909.08053; sequence-sharded norms, arXiv
2205.05198) the residual stream is split by positions, so that norms and additions are done once:

    residual stream     [B S/t D]     norms, additions, routing
      -> all-gather over t            one for attention, one for the feed-forward layer
    inside a sublayer   [B S  N/t]    heads, hidden units
      -> reduce-scatter over t        one each

Each moves (t - 1) / t of B S D values, and the gradient as many back: the gradients of several
products with one input are added before they travel. Without rematerialisation the gathered input
is kept for the backward pass, t times as large as the stream. The embedding and the head are split
by vocabulary; the logits [B S V/t] never travel: the loss needs three f32 numbers per token
(`jaxmoe.training.loss`).
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.jax_versions import match_varying
from pallas_kernels.quantized_array import QuantizedDtype
from sharding import axes as ax
from sharding.constrain import Encoded, Placement
from sharding.products.collective import WHOLE_PRODUCTS, TensorProductsConfig
from sharding.products.encoded import EncodedProduct
from sharding.products.low_rank import LowRank
from sharding.products.quantized import Quantized, Weight, logical_axes, quantized_einsum
from sharding.products.wrapped import WrappedMatrix


@dataclasses.dataclass(frozen=True, slots=True)
class Product:
    """A product of activations and a weight."""

    subscripts: str
    """Subscripts of `jnp.einsum`, activations first."""
    weight: Weight
    """Weight in the dtype of the activations, or quantised, or with a low-rank addition."""
    weight_axes: tuple[str | None, ...]
    """Logical axes of the weight in use; a dimension that is None here and split in storage is
    gathered first."""
    spread_axes: tuple[str | None, ...]
    """Logical axes of the activations other than the stream."""
    dtype: Any = None
    """Dtype of the result; None: that of the activations."""
    activations: QuantizedDtype | None = None
    """Dtype to which activations are rounded before a quantised weight; None: not rounded."""
    encoded: EncodedProduct | None = None
    """Product in few bits, forward and backward; None: in the dtype of the operands."""

    @property
    def entry(self) -> Any:
        """Logical axes with which the weight enters a region."""
        if self.encoded is None:
            return logical_axes(self.weight, self.weight_axes)
        contracted = len(set.intersection(*map(set, self.subscripts.partition("->")[0].split(","))))
        return Encoded(self.weight_axes, partial(self.encoded.encode, contracted=contracted))

    def of(self, x: Array, weight: Any, placement: Placement) -> Array:
        """Return the product inside a region.

        Args:
            x: Activations of this device.
            weight: The weight as it has entered.
            placement: Layout rules.
        """
        if self.encoded is not None:
            return self.encoded.project(x, weight, self.dtype)
        if isinstance(weight, LowRank):
            return weight.additions(self.of(x, weight.weight, placement), x)
        product = partial(placement.einsum, self.subscripts, axes=(), dtype=self.dtype)
        if isinstance(weight, WrappedMatrix):
            return weight.multiply(product, x)
        if isinstance(weight, Quantized):
            options = {"activations": self.activations, "dtype": self.dtype or x.dtype}
            return quantized_einsum(self.subscripts, x, weight, **options)
        return product(x, weight)


def out_of_stream(
    x: Float[Array, "B S D"],
    products: dict[str, Product],
    placement: Placement,
    *,
    is_stream: bool = True,
    form: TensorProductsConfig = WHOLE_PRODUCTS,
) -> dict[str, Array]:
    """Return products of the residual stream, which is gathered once for all of them.

    Args:
        x: The stream, in the compute dtype.
        products: Products by name; their results are split by `spread_axes`.
        placement: Layout rules.
        is_stream: Whether x is the stream; False: x has been gathered already.
        form: How the gather and the products are taken together.
    """
    names = stream_positions(placement) if is_stream else ()

    def run(x: Array, weights: dict[str, Any], *, batch_axes: tuple[str, ...]) -> Any:
        del batch_axes

        def multiply(x: Array) -> dict[str, Array]:
            return {name: p.of(x, weights[name], placement) for name, p in products.items()}

        return form.gather_products(x, names, multiply) if names else multiply(x)

    region = placement.region(
        run,
        in_axes=(
            _STREAM if is_stream else _GATHERED,
            {name: p.entry for name, p in products.items()},
        ),
        out_axes={name: p.spread_axes for name, p in products.items()},
    )
    return region(x, {name: p.weight for name, p in products.items()})


def along_stream(
    x: Float[Array, "B S D"], products: dict[str, Product], placement: Placement
) -> dict[str, Float[Array, "B S ..."]]:
    """Return products of the residual stream in its own layout: no activation travels.

    Args:
        x: The stream, in the compute dtype.
        products: Products by name, with weights that are whole in use; their results are laid out
            as the stream, and `spread_axes` is not read.
        placement: Layout rules.
    """

    def run(x: Array, weights: dict[str, Array], *, batch_axes: tuple[str, ...]) -> Any:
        del batch_axes
        return {
            name: placement.einsum(p.subscripts, x, weights[name], axes=(), dtype=p.dtype)
            for name, p in products.items()
        }

    region = placement.region(
        run,
        in_axes=(_STREAM, {name: p.weight_axes for name, p in products.items()}),
        out_axes=dict.fromkeys(products, _STREAM),
    )
    return region(x, {name: p.weight for name, p in products.items()})


def into_stream(
    hidden: Array,
    product: Product,
    placement: Placement,
    *,
    form: TensorProductsConfig = WHOLE_PRODUCTS,
) -> Float[Array, "B S D"]:
    """Return a product in the layout of the stream: partial sums are added by a reduce-scatter.

    Args:
        hidden: Activations split by `product.spread_axes`.
        product: Product that sums over the split dimension.
        placement: Layout rules.
        form: How the product and the scatter are taken together.
    """
    names = stream_positions(placement)
    axes = tuple(axis for axis in _spread(product, placement) if axis not in names)

    def run(hidden: Array, weight: Any, *, batch_axes: tuple[str, ...]) -> Array:
        del batch_axes

        def multiply(hidden: Array) -> Array:
            return product.of(hidden, weight, placement)

        y = form.scatter_products(hidden, names, multiply) if names else multiply(hidden)
        return jax.lax.psum(y, axes) if axes else y

    region = placement.region(run, in_axes=(product.spread_axes, product.entry), out_axes=_STREAM)
    return region(hidden, product.weight)


_STREAM = (ax.ACT_BATCH, ax.ACT_SEQ, ax.ACT_EMBED)
_GATHERED = (ax.ACT_BATCH, ax.ACT_SEQ_INNER, ax.ACT_EMBED)


def stream_positions(placement: Placement) -> tuple[str, ...]:
    """Return the mesh axes that split positions of the stream but not within a sublayer."""
    inner = placement.mesh_axes(ax.ACT_SEQ_INNER)
    return tuple(axis for axis in placement.mesh_axes(ax.ACT_SEQ) if axis not in inner)


def _spread(product: Product, placement: Placement) -> tuple[str, ...]:
    """Return the mesh axes that split a product's activations but not its result."""
    rows = (ax.ACT_BATCH, ax.ACT_SEQ_INNER)
    spread = [name for name in product.spread_axes if name is not None and name not in rows]
    return tuple(axis for name in spread for axis in placement.mesh_axes(name))


def look_up(
    table: Float[Array, "V D"], ids: Int[Array, "B S"], placement: Placement
) -> Float[Array, "B S D"]:
    """Return rows of a table that may be split by vocabulary, laid out as the residual stream.

    Each device takes the rows it has, zeros for the others; a reduce-scatter over positions adds
    them. Other splits of the table are gathered first.

    Args:
        table: One row per id.
        ids: Ids in [0, V); checked by the caller.
        placement: Layout rules.
    """
    names = placement.mesh_axes(ax.VOCAB)
    scattered = stream_positions(placement)

    def take(table: Array, ids: Array, *, batch_axes: tuple[str, ...]) -> Array:
        del batch_axes
        if not names:
            return _rows(table, ids)
        ids = ids - jax.lax.axis_index(names).astype(ids.dtype) * ids.dtype.type(table.shape[0])
        is_here = (ids >= 0) & (ids < table.shape[0])
        rows = jnp.where(is_here[..., None], _rows(table, ids), 0)
        if scattered:
            return jax.lax.psum_scatter(rows, names, scatter_dimension=1, tiled=True)
        return jax.lax.psum(rows, names)

    region = placement.region(
        take,
        in_axes=((ax.VOCAB, None), (ax.ACT_BATCH, ax.ACT_SEQ_INNER)),
        out_axes=(ax.ACT_BATCH, ax.ACT_SEQ, None),
    )
    return region(table, ids)


def _rows(table: Float[Array, "V D"], ids: Int[Array, "B S"]) -> Float[Array, "B S D"]:
    """Return rows of a table, whose gradients are added up in f32 and rounded once.

    A frequent id has thousands of gradients: in bfloat16 a sum of ones ends at 256.
    """

    def take(table: Array, ids: Array) -> Array:
        return table.at[ids].get(mode="clip")

    if table.dtype.itemsize >= jnp.dtype(jnp.float32).itemsize:
        return take(table, ids)
    shape = table.shape
    dtype = table.dtype
    rows = jax.custom_vjp(take)

    def backward(ids: Array, gradient: Array) -> tuple[Array, None]:
        zeros = match_varying(jnp.zeros(shape, jnp.float32), gradient)
        total = zeros.at[ids].add(gradient.astype(jnp.float32), mode="clip")
        return total.astype(dtype), None

    rows.defvjp(lambda table, ids: (take(table, ids), ids), backward)
    return rows(match_varying(table, ids), ids)
