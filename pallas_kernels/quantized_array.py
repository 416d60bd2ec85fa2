# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Rounds arrays to 8 and 4 bits with scales: `quantize`, `dequantize` and `QuantizedArray`.

    x ~ values * scales        scales = max |x| over what shares one / Q        with the largest Q:

    int8 127    int4 7    float8_e4m3fn 448    float8_e5m2 57344    mxfp8 448 and scales of 2^n

A scale is shared by everything (axis None), by all of the contracted axis (a scale per channel), or
by blocks along it. mxfp8 is float8_e4m3fn in blocks of 32 with scales in float8_e8m0fnu, rounded up
(OCP Microscaling Formats 1.0). Integers are symmetric, so that -x has the values of x negated.

Zeros have the scale 1. Where NaN or infinity shares a scale, all values that share it come back as
NaN, because integers have neither. float8_e4m3fn has no infinity and casts what is too large to
NaN: values are clipped before they are cast.

To add a dtype: a line in `_FORMATS` of `pallas_kernels/quantized_array.py`.
"""

import dataclasses
import math
import typing
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import Array, Float, Key, Shaped
from pallas_kernels.jax_versions import match_varying

QuantizedDtype = Literal["int8", "int4", "float8_e4m3fn", "float8_e5m2", "mxfp8"]


class _Format(NamedTuple):
    """Storage of a dtype."""

    values: Any
    """Dtype of the values."""
    largest: float
    """Value of the largest |x|."""
    scales: Any = jnp.float32
    """Dtype of the scales."""
    block_size: int | None = None
    """Only allowed block size; None allows any."""


_FORMATS: dict[str, _Format] = {
    "int8": _Format(jnp.int8, 127.0),
    "int4": _Format(jnp.int4, 7.0),
    "float8_e4m3fn": _Format(jnp.float8_e4m3fn, 448.0),
    "float8_e5m2": _Format(jnp.float8_e5m2, 57344.0),
    "mxfp8": _Format(jnp.float8_e4m3fn, 448.0, jnp.float8_e8m0fnu, 32),
}
# Below the smallest normal number a scale would lose its own precision, or be 0.
_SMALLEST_SCALE = float(jnp.finfo(jnp.float32).tiny)


# Not type-checked: tree functions also fill records with shapes, specs and tracers.
@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedArray:
    """Array in few bits: a pytree of two arrays, which shards, scans and is saved like others.

    Like any pytree it may temporarily hold other leaves than arrays: shapes, partition specs, the
    axes of a `vmap`, placeholders of differentiation.
    """

    values: Shaped[Array, "..."] | Any
    """int8, int4 or float8, in the shape of the array."""
    scales: Shaped[Array, "..."] | Any
    """float32 (mxfp8: float8_e8m0fnu), with as many dimensions: one per block along `axis`, one per
    index along others; (1, ..., 1) where `axis` is None.
    """
    axis: int | None = dataclasses.field(metadata={"static": True})
    """Contracted axis, counted from the end so that a scan may remove others; None: one scale."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return self.values.shape

    @property
    def ndim(self) -> int:
        """Number of dimensions of the array."""
        return self.values.ndim

    @property
    def dtype_name(self) -> QuantizedDtype:
        """Dtype name that `quantize` takes."""
        for name, form in _FORMATS.items():
            if (self.values.dtype, self.scales.dtype) == (form.values, form.scales):
                return name  # type: ignore[return-value]
        raise ValueError(
            f"A QuantizedArray of {self.values.dtype} with scales of {self.scales.dtype} is none "
            f"of {', '.join(_FORMATS)}: make it with quantize."
        )

    @property
    def num_blocks(self) -> int:
        """Number of scales along the contracted axis; 1 where they do not vary along it."""
        return 1 if self.axis is None else self.scales.shape[self.axis]

    @property
    def block_size(self) -> int | None:
        """Values along the contracted axis that share a scale; None where all do."""
        if self.axis is None or self.num_blocks == 1:
            return None
        return self.values.shape[self.axis] // self.num_blocks


def quantize(
    x: Float[Array, "..."],
    dtype: QuantizedDtype,
    *,
    axis: int | None,
    block_size: int | None = None,
    key: Key[Array, ""] | None = None,
    over: tuple[str, ...] = (),
) -> QuantizedArray:
    """Round to few bits, with scales that fit the largest value exactly.

    Args:
        x: Array of any floating dtype.
        dtype: Dtype name of the result.
        axis: Contracted axis, whose values share a scale; scales vary over all others. None takes
            one scale for everything (`jax.vmap` gives one per matrix of a stack).
        block_size: Values along `axis` that share a scale; None for all of them (mxfp8: always 32).
        key: PRNG key of stochastic rounding, which is right in the mean; None rounds to nearest.
        over: Mesh axes of a manual region over which the values that share a scale are sharded:
            scales then fit the largest value on any of their devices.

    Returns:
        The array in few bits. Its gradient is 0 almost everywhere: differentiate around it.

    Raises:
        ValueError: The dtype is unknown, x is not floating, x lacks the axis, or blocks do not
            divide it.
    """
    form, axis, blocks = _check(x, dtype, axis, block_size)
    wide = x.astype(jnp.float32)
    parts = wide if axis is None else _in_blocks(wide, axis, blocks)
    shared = tuple(range(x.ndim)) if axis is None else parts.ndim + axis
    largest = jnp.max(jnp.abs(parts), axis=shared, keepdims=True, initial=0.0)
    if over:
        largest = match_varying(jax.lax.pmax(largest, over), x)
    scales = _scales(largest, form)
    scaled = jnp.clip(parts / scales.astype(jnp.float32), -form.largest, form.largest)
    if key is not None:
        scaled = _round_at_random(scaled, form.values, key)
    elif jnp.issubdtype(form.values, jnp.integer):
        scaled = jnp.round(scaled)
    # NaN has no integer: its scale is NaN instead.
    scaled = jnp.where(jnp.isnan(scaled), 0.0, scaled)
    values = scaled.reshape(x.shape).astype(form.values)
    if axis is not None:
        scales = jnp.squeeze(scales, parts.ndim + axis)
    return QuantizedArray(values=values, scales=scales, axis=axis)


def dequantize(x: QuantizedArray, dtype: Any = jnp.float32) -> Float[Array, "..."]:
    """Return the values that a quantised array represents.

    Args:
        x: Quantised array.
        dtype: Dtype of the result; products with scales are taken in float32.
    """
    values = x.values.astype(jnp.float32)
    scales = x.scales.astype(jnp.float32)
    if x.axis is None or x.num_blocks == 1:
        return (values * scales).astype(dtype)
    parts = _in_blocks(values, x.axis, x.num_blocks)
    return (parts * jnp.expand_dims(scales, parts.ndim + x.axis)).reshape(x.shape).astype(dtype)


def constant(x: Float[Array, "..."] | QuantizedArray) -> Float[Array, "..."]:
    """Return an operand as values without a gradient where it is quantised."""
    return jax.lax.stop_gradient(dequantize(x)) if isinstance(x, QuantizedArray) else x


def _in_blocks(x: Array, axis: int, blocks: int) -> Array:
    """Reshape [..., k, ...] to [..., blocks, k / blocks, ...]; the axis is then that of a block."""
    place = x.ndim + axis
    return x.reshape(*x.shape[:place], blocks, x.shape[place] // blocks, *x.shape[place + 1 :])


def _scales(largest: Array, form: _Format) -> Array:
    scales = jnp.where(largest == 0.0, 1.0, jnp.maximum(largest / form.largest, _SMALLEST_SCALE))
    # An infinite scale would turn the other values into 0.
    scales = jnp.where(jnp.isfinite(largest), scales, jnp.nan)
    if form.scales == jnp.float32:
        return scales
    mantissa, exponent = jnp.frexp(scales)
    exponent = jnp.where(mantissa == 0.5, exponent - 1, exponent)
    return jnp.where(jnp.isnan(scales), jnp.nan, jnp.ldexp(1.0, exponent)).astype(form.scales)


def _round_at_random(scaled: Array, dtype: Any, key: Array) -> Array:
    """Round to a neighbour with a probability that makes the mean exact."""
    step = jnp.ones_like(scaled)
    if not jnp.issubdtype(dtype, jnp.integer):
        info = jnp.finfo(dtype)
        exponent = jnp.maximum(jnp.frexp(scaled)[1] - 1, int(info.minexp))
        step = jnp.ldexp(1.0, exponent - info.nmant)
    noise = jax.random.uniform(key, scaled.shape, jnp.float32)
    return jnp.floor(scaled / step + noise) * step


def _check(
    x: Array, dtype: str, axis: int | None, block_size: int | None
) -> tuple[_Format, int | None, int]:
    """Return the format, the axis counted from the end, and the number of blocks along it."""
    if dtype not in _FORMATS:
        raise ValueError(f"quantize: dtype={dtype!r} must be one of {', '.join(_FORMATS)}.")
    form = _FORMATS[dtype]
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"quantize takes floating numbers, and x is {x.dtype}.")
    block_size = block_size if form.block_size is None else block_size or form.block_size
    if form.block_size not in (None, block_size):
        raise ValueError(f"quantize: {dtype} has blocks of {form.block_size}, not {block_size}.")
    if axis is None:
        if block_size is not None:
            raise ValueError(f"quantize: block_size={block_size} needs the axis that it cuts.")
        return form, None, 1
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"quantize: axis={axis} is not one of the {x.ndim} of x {x.shape}.")
    size = x.shape[axis]
    axis = axis if axis < 0 else axis - x.ndim
    if block_size is None or size == 0:
        return form, axis, 1
    if block_size < 1 or size % block_size:
        near = sorted(_divisors(size), key=lambda d: (abs(d - block_size), d))[:2]
        raise ValueError(
            f"quantize: block_size={block_size} must divide axis {axis} of x {x.shape}, which has "
            f"{size}: choose {' or '.join(map(str, sorted(near)))}, or pad x."
        )
    return form, axis, size // block_size


def _divisors(size: int) -> set[int]:
    small = [d for d in range(1, math.isqrt(size) + 1) if size % d == 0]
    return {*small, *(size // d for d in small)}
