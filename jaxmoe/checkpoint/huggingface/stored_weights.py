# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Reads weights that are stored in few bits, and leaves out tensors that are no weights.

    fp8     X.weight float8_e4m3fn [out, in], X.weight_scale_inv [out / 128, in / 128]
            w = weight * scale of its block (DeepSeek-V3, arXiv 2412.19437, section 3.3)
    mxfp4   X_blocks uint8 [E, out, in / 32, 16], X_scales uint8 [E, out, in / 32]
            w = fp4 * 2^(scale - 127), two values a byte, the first in the low bits (gpt-oss;
            OCP Microscaling Formats 1.0)
    int4, int8 of compressed-tensors, AWQ and GPTQ: `formats/packed_integers.py`

Values are computed in float32 when a tensor is read, one tensor at a time. Both factors are powers
of two or few bits wide, so the products of fp8 are rounded once and those of mxfp4 are exact.

To add a format: a function from names to tensors, its row in `_FORMATS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from jaxmoe.checkpoint.huggingface.filling import tensor_values
from jaxmoe.checkpoint.huggingface.formats.packed_integers import (
    CONFIG,
    DecodedTensor,
    decode_awq,
    decode_compressed,
    decode_gptq,
)
from jaxmoe.checkpoint.huggingface.paths import show_value
from jaxmoe.checkpoint.manifest import CheckpointError

_NO_WEIGHTS = (".rotary_emb.inv_freq", ".activation_scale", ".input_scale")
"""Ends of names of tensors that follow from the config, or that this library does not use."""
_FP4 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
_FP4_VALUES = np.concatenate([_FP4, -_FP4])
_EXPONENT_BIAS = 127
_MX_BLOCK = 32


def decode_weights(fields: Mapping[str, Any], tensors: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the weights of stored tensors, by the names that they have without a format.

    Args:
        fields: Fields of config.json.
        tensors: Stored tensors by name.

    Raises:
        CheckpointError: The format is not read here, or a tensor lacks its scales.
    """
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith(_NO_WEIGHTS)}
    settings = fields.get(CONFIG)
    if settings is None:
        return tensors
    method = settings.get("quant_method") if isinstance(settings, Mapping) else None
    if method not in _FORMATS:
        raise CheckpointError(
            f"config.{CONFIG}.quant_method={show_value(method)} is not read here, only"
            f" {', '.join(_FORMATS)}: write the weights as bfloat16 with the library that"
            " quantised them"
        )
    return _FORMATS[method](settings, tensors)


def _decode_fp8(settings: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the products of weights and the scales of their blocks."""
    block = settings.get("weight_block_size")
    if block is not None and not _is_block(block):
        raise CheckpointError(
            f"config.{CONFIG}.weight_block_size={show_value(block)} must be two integers above 0"
        )
    decoded: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if name.endswith("_scale_inv"):
            continue
        scales = tensors.get(f"{name}_scale_inv")
        if scales is not None:
            tensor = _weight_times_scales(name, tensor, scales, block)
        elif str(tensor.dtype).removeprefix("torch.").startswith("float8"):
            raise CheckpointError(
                f"{name} is stored in 8 bits and {name}_scale_inv is missing: download the files"
                " again"
            )
        decoded[name] = tensor
    orphans = [
        name
        for name in tensors
        if name.endswith("_scale_inv") and name.removesuffix("_scale_inv") not in tensors
    ]
    if orphans:
        raise CheckpointError(f"{orphans[0]} has no weight beside it: download the files again")
    return decoded


def _is_block(block: Any) -> bool:
    return (
        isinstance(block, list | tuple)
        and len(block) == 2
        and all(type(size) is int and size > 0 for size in block)
    )


def _weight_times_scales(name: str, tensor: Any, scales: Any, block: Any) -> DecodedTensor:
    """Return a weight times the scales of its blocks."""
    shape = tuple(tensor.shape)
    sizes = tuple(block) if block is not None else shape[-2:]
    grid = tuple(-(-length // size) for length, size in zip(shape[-2:], sizes, strict=True))
    expected = (*shape[:-2], *grid) if tuple(scales.shape) else ()
    if tuple(scales.shape) != expected:
        raise CheckpointError(
            f"{name}_scale_inv is {list(scales.shape)}, expected {list(expected)}: blocks of"
            f" {list(sizes)} of a weight {list(shape)}"
        )

    def read() -> np.ndarray:
        values = tensor_values(tensor).astype(np.float32)
        factors = tensor_values(scales).astype(np.float32)
        if factors.ndim:
            for axis, size in zip((-2, -1), sizes, strict=True):
                factors = np.repeat(factors, size, axis=axis)
            factors = factors[..., : shape[-2], : shape[-1]]
        return values * factors

    return DecodedTensor(shape, read, getattr(tensor, "file", None))


def _decode_mxfp4(settings: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of blocks of 32 with a power of two each, [E, in, out]."""
    del settings
    decoded: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if name.endswith("_scales"):
            if f"{name.removesuffix('_scales')}_blocks" not in tensors:
                raise CheckpointError(f"{name} has no blocks beside it: download the files again")
        elif name.endswith("_blocks"):
            weight = name.removesuffix("_blocks")
            decoded[weight] = _blocks(weight, tensor, tensors.get(f"{weight}_scales"))
        else:
            decoded[name] = tensor
    return decoded


def _blocks(name: str, blocks: Any, scales: Any) -> DecodedTensor:
    """Return the values of the blocks of the experts of a layer."""
    if scales is None:
        raise CheckpointError(f"{name}_blocks has no {name}_scales beside it: download them again")
    shape = tuple(blocks.shape)
    if len(shape) != 4 or shape[-1] * 2 != _MX_BLOCK or tuple(scales.shape) != shape[:-1]:
        raise CheckpointError(
            f"{name}_blocks {list(shape)} and {name}_scales {list(scales.shape)} must be [E, out,"
            " in / 32, 16] and [E, out, in / 32]"
        )
    experts, outs, count, _ = shape

    def read() -> np.ndarray:
        codes = tensor_values(blocks).astype(np.uint8)
        values = np.empty((experts, outs, count, _MX_BLOCK), np.float32)
        values[..., 0::2] = _FP4_VALUES[codes & 0xF]
        values[..., 1::2] = _FP4_VALUES[codes >> 4]
        exponents = tensor_values(scales).astype(np.int32) - _EXPONENT_BIAS
        values = np.ldexp(values, exponents[..., None])
        return np.swapaxes(values.reshape(experts, outs, -1), 1, 2)

    return DecodedTensor((experts, count * _MX_BLOCK, outs), read, getattr(blocks, "file", None))


_FORMATS: Final[dict[Any, Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any]]]] = {
    "fp8": _decode_fp8,
    "mxfp4": _decode_mxfp4,
    "compressed-tensors": decode_compressed,
    "awq": decode_awq,
    "gptq": decode_gptq,
}
