# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""A weight as HALO multiplies it: rotated along its contracted axis, in few bits, and gathered so.

    codes = Q(H^T W)          of the piece that a device has, with the scale of the whole weight
    codes of the whole        all-gathered: 1 byte per value, where W itself would send 4 or 2
    dW    = H dcodes          reduce-scattered in the dtype of W, then rotated back by each device

Rotating blocks of the piece is rotating the whole in these blocks, so nothing but codes is sent
(HALO, arXiv 2501.02625, section 4.3: HQ-FSDP). Where the contracted axis is cut so finely that a
piece is narrower than `Halo.block`, the block is narrower too, and so is that of the activations:
another rotation, hence another rounding, of the same product.

A scale belongs to one matrix: to each of a stack of experts its own. Codes have no gradient; it
goes through `EncodedWeight.carrier`, zeros of the shape of the product's matrix, which nothing
reads and XLA drops.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import Array, Float
from pallas_kernels.halo.hadamard import hadamard, rotated_together
from pallas_kernels.jax_versions import match_varying
from pallas_kernels.quantized_array import QuantizedArray, quantize

MeshAxes = tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Halo:
    """How products are taken in few bits."""

    dtype: Literal["int8", "float8_e4m3fn"] | None
    """Of the codes; None: nothing is rounded, which shows that the rest is exact."""
    level: Literal[0, 1, 2]
    """0: no rotation. 1: along the contracted axis of the forward product. 2: and of what comes
    back to the activations, over tokens."""
    block: int | None = None
    """The most values that are rotated together; None: as many as there are."""

    def quantize(self, x: Array, over: MeshAxes = ()) -> QuantizedArray | Array:
        """All of x with one scale.

        Args:
            x: in float32.
            over: mesh axes over which it is cut.
        """
        return x if self.dtype is None else quantize(x, self.dtype, axis=None, over=over)


# Not checked at run time: tree functions also fill records with shapes, specs and tracers.
@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EncodedWeight:
    """A weight, ready to be multiplied: a pytree."""

    codes: QuantizedArray | Array
    """[*stack k n]: one matrix, or one for each group of rows."""
    carrier: Array
    """Zeros of that shape, in the dtype of the weight: its gradient is the codes'."""
    block: int = dataclasses.field(metadata={"static": True})
    """Values along k that were rotated together; 1: none were."""
    contracted: int = dataclasses.field(metadata={"static": True})
    """How many dimensions k was."""
    outputs: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    """What n was before it was made one dimension."""


def encode(
    weight: Float[Array, ...],
    halo: Halo,
    *,
    contracted: int = 1,
    is_stack: bool = False,
    gathered: tuple[MeshAxes, ...] = (),
    over: MeshAxes = (),
) -> EncodedWeight:
    """Rotates, rounds and gathers a weight.

    Args:
        weight: [*stack, contracted dimensions, others], or a device's piece of it.
        halo: how.
        contracted: how many dimensions a product sums over, those of one matrix that come first.
            Of these only the first may be gathered.
        is_stack: the first dimension counts matrices.
        gathered: of each dimension the mesh axes along which it is gathered; (): nothing is.
        over: mesh axes over which one matrix is cut, gathered or not: its scale fits all of it.

    Returns:
        The whole weight; the gradient of its carrier comes back to each piece, summed over the
        devices that gathered it.

    Raises:
        ValueError: a contracted dimension behind the first is gathered: pieces of it are not
            blocks of what is rotated.
    """
    if any(gathered[is_stack + 1 : is_stack + contracted]):
        raise ValueError(
            f"encode: gathered={gathered} cuts a contracted dimension of weight {weight.shape}"
            f" other than dimension {int(is_stack)}: gather the weight itself (precision.matmul"
            ".gathered=weight), or cut another dimension"
        )
    places = [(d, names) for d, names in enumerate(gathered) if names]
    stack = weight.shape[:is_stack]
    split = is_stack + contracted
    piece = (*stack, math.prod(weight.shape[is_stack:split]), math.prod(weight.shape[split:]))
    block = rotated_together(piece[-2], halo.block) if halo.level else 1

    def whole(values: Array) -> Array:
        """The matrices of all pieces, of which this device has one."""
        values = values.reshape(weight.shape)
        for dimension, names in places:
            values = jax.lax.all_gather(values, names, axis=dimension, tiled=True)
        return values

    def matrices(values: Array) -> Array:
        shape = values.shape
        inner, outer = shape[is_stack:split], shape[split:]
        return values.reshape(*shape[:is_stack], math.prod(inner), math.prod(outer))

    def code(matrix: Array) -> Any:
        return halo.quantize(hadamard(matrix, axis=-2, block=block), over)

    def gathered_scales(scales: Array) -> Array:
        if is_stack and gathered and gathered[0]:
            return jax.lax.all_gather(scales, gathered[0], axis=0, tiled=True)
        return scales

    @jax.custom_vjp
    def coded(weight: Array) -> tuple[Any, Array]:
        flat = weight.reshape(piece).astype(jnp.float32)
        codes = jax.vmap(code)(flat) if is_stack else code(flat)
        if isinstance(codes, QuantizedArray):
            codes = dataclasses.replace(
                codes,
                values=matrices(whole(codes.values)),
                scales=gathered_scales(codes.scales),
            )
            shape = codes.values.shape
        else:
            codes = matrices(whole(codes))
            shape = codes.shape
        return codes, match_varying(jnp.zeros(shape, weight.dtype), weight)

    def backward(shape: tuple[int, ...], gradients: tuple[Any, Array]) -> tuple[Array]:
        d_weight = gradients[1].reshape(shape)
        for dimension, names in reversed(places):
            d_weight = jax.lax.psum_scatter(
                d_weight, names, scatter_dimension=dimension, tiled=True
            )
        flat = d_weight.reshape(piece).astype(jnp.float32)
        flat = hadamard(flat, axis=-2, block=block, is_inverse=True)
        return (flat.reshape(weight.shape).astype(weight.dtype),)

    sizes = [
        size * math.prod(map(jax.lax.axis_size, names))
        for size, names in zip(weight.shape, gathered or ((),) * weight.ndim, strict=True)
    ]
    whole_shape = tuple(sizes)
    coded.defvjp(lambda weight: (coded(weight), None), lambda _, g: backward(whole_shape, g))
    codes, carrier = coded(weight)
    outputs = whole_shape[split:]
    return EncodedWeight(
        codes=codes, carrier=carrier, block=block, contracted=contracted, outputs=outputs
    )
