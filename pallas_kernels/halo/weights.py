# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Encodes a weight for HALO: rotated along its contracted axis, in few bits, and gathered as codes.

    codes = Q(H^T W)          of the shard that a device has, with the scale of the whole weight
    codes of the whole        all-gathered: 1 byte per value, where W itself would send 4 or 2
    dW    = H dcodes          reduce-scattered in the dtype of W, then rotated back by each device

Rotating blocks of a shard is rotating the whole weight in these blocks, so only codes are sent
(HALO, arXiv 2501.02625, section 4.3: HQ-FSDP). Where the contracted axis is cut so finely that a
shard is narrower than `Halo.block`, the block is narrower too, and so is that of the activations:
another rotation, hence another rounding, of the same product.

Each matrix of a stack of experts has its own scale. Codes have no gradient; it goes through
`EncodedWeight.carrier`, unread zeros in the shape of the product's matrix, which XLA drops.
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
    """Format of products in few bits."""

    dtype: Literal["int8", "float8_e4m3fn"] | None
    """Dtype of the codes; None rounds nothing, for tests of exactness."""
    level: Literal[0, 1, 2]
    """Rotation level: 0 rotates nothing, 1 the contracted axis of the forward product, 2 also the
    tokens of the gradient of the activations.
    """
    block: int | None = None
    """Largest number of values that are rotated together; None for no limit."""

    def quantize(self, x: Array, over: MeshAxes = ()) -> QuantizedArray | Array:
        """Round all of x with one scale.

        Args:
            x: Array in float32.
            over: Mesh axes over which it is sharded.
        """
        return x if self.dtype is None else quantize(x, self.dtype, axis=None, over=over)


# Not type-checked: tree functions also fill records with shapes, specs and tracers.
@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EncodedWeight:
    """Weight that is ready to be multiplied; a pytree."""

    codes: QuantizedArray | Array
    """[*stack k n]: one matrix, or one per group of rows."""
    carrier: Array
    """Zeros of the same shape in the dtype of the weight; its gradient is that of the codes."""
    block: int = dataclasses.field(metadata={"static": True})
    """Values along k that were rotated together; 1 for none."""
    contracted: int = dataclasses.field(metadata={"static": True})
    """Number of dimensions that were flattened into k."""
    outputs: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    """Dimensions that were flattened into n."""


def encode(
    weight: Float[Array, ...],
    halo: Halo,
    *,
    contracted: int = 1,
    is_stack: bool = False,
    gathered: tuple[MeshAxes, ...] = (),
    over: MeshAxes = (),
) -> EncodedWeight:
    """Rotate, round and gather a weight.

    Args:
        weight: [*stack, contracted dimensions, others], or a device's shard of it.
        halo: Format of the codes.
        contracted: Number of dimensions that a product sums over, the first ones of one matrix.
            Only
            the first of them may be gathered.
        is_stack: Whether the first dimension counts matrices.
        gathered: Mesh axes along which each dimension is gathered; () gathers nothing.
        over: Mesh axes over which one matrix is sharded, gathered or not; its scale fits all of it.

    Returns:
        The whole weight. The gradient of its carrier comes back to each shard, summed over the
        devices that gathered it.

    Raises:
        ValueError: A contracted dimension other than the first is gathered; its shards are no
            blocks of the rotation.
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
        """Gather the matrices of all shards."""
        values = values.reshape(weight.shape)
        for dimension, names in places:
            values = jax.lax.all_gather(values, names, axis=dimension, tiled=True)
        return values

    def matrices(values: Array) -> Array:
        shape = values.shape
        inner = shape[is_stack:split]
        outer = shape[split:]
        return values.reshape(*shape[:is_stack], math.prod(inner), math.prod(outer))

    def code(matrix: Array) -> Any:
        return halo.quantize(hadamard(matrix, axis=-2, block=block), over)

    def gathered_scales(scales: Array) -> Array:
        if is_stack and gathered and gathered[0]:
            return jax.lax.all_gather(scales, gathered[0], axis=0, tiled=True)
        return scales

    @jax.custom_vjp
    def cod(weight: Array) -> tuple[Any, Array]:
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
    cod.defvjp(lambda weight: (cod(weight), None), lambda _, g: backward(whole_shape, g))
    codes, carrier = cod(weight)
    outputs = whole_shape[split:]
    return EncodedWeight(
        codes=codes, carrier=carrier, block=block, contracted=contracted, outputs=outputs
    )
