# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Reads weights whose integers of 4 or 8 bits lie in words of 32, the first in the low bits.

    compressed-tensors  X.weight_packed [out, in / n], X.weight_scale [out, in / g],
    pack-quantized      X.weight_zero_point [out / n, in / g] where it is not symmetric,
                        X.weight_shape [2], X.weight_g_idx [in] where groups are not in order
                        w = (q - zero) scale; q and zero are signed, stored + 2^(bits - 1)
    awq (gemm)          X.qweight [in, out / n], X.qzeros [in / g, out / n], X.scales [in / g, out]
                        w^T = (q - zero) scale; a word has outputs 0, 2, 4, 6, 1, 3, 5, 7
    gptq                X.qweight [in / n, out], X.qzeros [in / g, out / n], X.scales [in / g, out],
                        X.g_idx [in], the group of each input
                        w^T = (q - zero) scale; format gptq stores zero - 1, gptq_v2 zero

n = 32 / bits integers make a word; g is the number of inputs of a group, all of them where it is
-1. Differences and products are computed in float32 when a tensor is read, one tensor at a time.
Sources: compressed-tensors 0.12 (`pack_quantized`), AutoAWQ and GPTQModel (packing of linear
layers); arXiv 2306.00978, 2210.17323.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from jaxmoe.checkpoint.huggingface.filling import tensor_values
from jaxmoe.checkpoint.huggingface.paths import show_value
from jaxmoe.checkpoint.manifest import CheckpointError

CONFIG: Final = "quantization_config"
"""Field of config.json that names the format."""
_WORD = 32
_BITS = (4, 8)
_AWQ_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)
"""Output of each place of a word."""
_AGAIN = "download the files again"


@dataclasses.dataclass(frozen=True, slots=True)
class DecodedTensor:
    """A tensor that is computed from stored ones when `numpy.asarray` reads it."""

    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]
    """Function that returns the values, f32."""
    file: Any = None
    """File of the stored values, for messages."""
    dtype: str = "float32"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy  # every read makes a new array
        values = self.read()
        return values if dtype is None else values.astype(dtype)


def decode_compressed(settings: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the weights of compressed-tensors, format pack-quantized.

    Args:
        settings: Field `quantization_config`.
        tensors: Stored tensors by name.

    Raises:
        CheckpointError: The format or a scheme is not read here, or tensors do not fit.
    """
    if (form := settings.get("format")) != "pack-quantized":
        raise _refusal("format", form, "'pack-quantized'")
    groups: Any = settings.get("config_groups")
    schemes = list(groups.values()) if isinstance(groups, Mapping) else []
    weights: Any = [scheme.get("weights") for scheme in schemes if isinstance(scheme, Mapping)]
    if not weights or not all(isinstance(scheme, Mapping) for scheme in weights):
        raise _refusal("config_groups", groups, "an object of schemes with weights")
    if any(scheme.get("input_activations") for scheme in schemes):
        raise _refusal("config_groups", "input_activations", "schemes without input_activations")
    bits = _only("config_groups.weights.num_bits", [row.get("num_bits") for row in weights], _BITS)
    _only("config_groups.weights.type", [row.get("type", "int") for row in weights], ("int",))

    def decode(name: str) -> DecodedTensor:
        sizes = _part(tensors, name, "weight_shape")
        packed = _part(tensors, name, "weight_packed")
        scales = _part(tensors, name, "weight_scale")
        _check(name, {"weight_shape": (sizes, (2,))})
        outs, ins = map(int, _words(sizes))
        groups = tuple(scales.shape)[-1] if len(scales.shape) == 2 else 0
        zeros = tensors.get(f"{name}.weight_zero_point")
        order = tensors.get(f"{name}.weight_g_idx")
        expected = {
            "weight_packed": (packed, (outs, _count(ins, bits))),
            "weight_scale": (scales, (outs, groups)),
            "weight_zero_point": (zeros, (_count(outs, bits), groups)),
            "weight_g_idx": (order, (ins,)),
        }
        _check(name, expected)
        if not groups or order is None and ins % groups:
            raise CheckpointError(f"{name}.weight_scale has {groups} groups of {ins} inputs")

        def read() -> np.ndarray:
            offset = 2 ** (bits - 1)
            values = _integers(_words(packed), bits)[:, :ins].astype(np.float32) - offset
            places = _places(f"{name}.weight_g_idx", order, ins, groups)
            if zeros is not None:
                points = _integers(_words(zeros).T, bits)[:, :outs].T.astype(np.float32) - offset
                values -= points[:, places]
            return values * tensor_values(scales).astype(np.float32)[:, places]

        return DecodedTensor((outs, ins), read, getattr(packed, "file", None))

    parts = ("weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")
    return _decode(tensors, "weight_packed", parts, decode)


def decode_awq(settings: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the weights of AWQ, version gemm.

    Args:
        settings: Field `quantization_config`.
        tensors: Stored tensors by name.

    Raises:
        CheckpointError: The version is not read here, or tensors do not fit.
    """
    version: Any = settings.get("version", "gemm")
    if str(version).lower() != "gemm":
        raise _refusal("version", version, "'gemm'")
    bits = _only("bits", [settings.get("bits", settings.get("w_bit"))], (4,))

    def decode(name: str) -> DecodedTensor:
        packed, zeros, scales = (
            _part(tensors, name, part) for part in ("qweight", "qzeros", "scales")
        )
        ins, num_words = _matrix(name, "qweight", packed)
        outs = num_words * (_WORD // bits)
        groups = _groups(settings, ins)
        expected = {"qzeros": (zeros, (groups, num_words)), "scales": (scales, (groups, outs))}
        _check(name, expected)

        def integers(tensor: Any) -> np.ndarray:
            rows = _integers(_words(tensor), bits)
            places = rows.reshape(len(rows), num_words, -1)
            values = np.empty_like(places)
            values[..., _AWQ_OUTPUTS] = places
            return values.reshape(rows.shape).astype(np.float32)

        def read() -> np.ndarray:
            places = _places(name, None, ins, groups)
            values = integers(_words(packed)) - integers(_words(zeros))[places]
            return (values * tensor_values(scales).astype(np.float32)[places]).T

        return DecodedTensor((outs, ins), read, getattr(packed, "file", None))

    return _decode(tensors, "qweight", ("qzeros", "scales"), decode)


def decode_gptq(settings: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the weights of GPTQ, formats gptq and gptq_v2.

    Args:
        settings: Field `quantization_config`.
        tensors: Stored tensors by name.

    Raises:
        CheckpointError: The format is not read here, or tensors do not fit.
    """
    form: Any = settings.get("checkpoint_format", "gptq")
    if form not in ("gptq", "gptq_v2"):
        raise _refusal("checkpoint_format", form, "'gptq' and 'gptq_v2'")
    bits = _only("bits", [settings.get("bits")], _BITS)
    step = int(form == "gptq")

    def decode(name: str) -> DecodedTensor:
        packed, zeros, scales = (
            _part(tensors, name, part) for part in ("qweight", "qzeros", "scales")
        )
        order = tensors.get(f"{name}.g_idx")
        num_words, outs = _matrix(name, "qweight", packed)
        ins = num_words * (_WORD // bits)
        groups = _groups(settings, ins)
        expected = {
            "qzeros": (zeros, (groups, _count(outs, bits))),
            "scales": (scales, (groups, outs)),
            "g_idx": (order, (ins,)),
        }
        _check(name, expected)

        def read() -> np.ndarray:
            places = _places(f"{name}.g_idx", order, ins, groups)
            points = (_integers(_words(zeros), bits)[:, :outs].astype(np.int32) + step) % 2**bits
            values = _integers(_words(packed).T, bits).astype(np.float32)
            values -= points.T[:, places]
            return values * tensor_values(scales).astype(np.float32).T[:, places]

        return DecodedTensor((outs, ins), read, getattr(packed, "file", None))

    return _decode(tensors, "qweight", ("qzeros", "scales", "g_idx"), decode)


def _decode(
    tensors: Mapping[str, Any],
    packed: str,
    parts: tuple[str, ...],
    decode: Callable[[str], DecodedTensor],
) -> dict[str, Any]:
    """Return weights for packed tensors, and other tensors as they are.

    Args:
        tensors: Stored tensors by name.
        packed: Last part of the names of packed tensors.
        parts: Last parts of the names of tensors beside them.
        decode: Function from the name of a module to its weight.

    Raises:
        CheckpointError: A part has no packed tensor beside it.
    """
    decoded: dict[str, Any] = {}
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".")
        if part == packed:
            decoded[f"{module}.weight"] = decode(module)
        elif part not in parts:
            decoded[name] = tensor
        elif f"{module}.{packed}" not in tensors:
            raise CheckpointError(f"{name} has no {packed} beside it: {_AGAIN}")
    return decoded


def _integers(packed: np.ndarray, bits: int) -> np.ndarray:
    """Return the unsigned integers of words [m, k]: [m, k * 32 / bits], uint8."""
    shifts = np.arange(0, _WORD, bits, dtype=np.uint32)
    values = packed.astype(np.uint32)[..., None] >> shifts
    return (values & np.uint32(2**bits - 1)).astype(np.uint8).reshape(len(packed), -1)


def _words(tensor: Any) -> np.ndarray:
    """Return the values of a tensor of integers as they are stored."""
    if hasattr(tensor, "detach"):  # PyTorch
        tensor = tensor.detach().cpu().numpy()
    return np.asarray(tensor)


def _count(size: int, bits: int) -> int:
    """Return the words of a number of integers."""
    return -(-size * bits // _WORD)


def _groups(settings: Mapping[str, Any], ins: int) -> int:
    """Return the groups of the inputs of a matrix."""
    size: Any = settings.get("group_size", settings.get("q_group_size", 128))
    if type(size) is not int or size == 0 or size < -1:
        raise _refusal("group_size", size, "an integer above 0, and -1 for one group")
    return 1 if size == -1 else -(-ins // size)


def _places(name: str, order: Any, ins: int, groups: int) -> np.ndarray:
    """Return the group of each input: neighbours, unless they are stored.

    Args:
        name: Name of the stored ones.
        order: Stored ones, of which -1 stands for none; None for none.
        ins: Inputs.
        groups: Groups.

    Raises:
        CheckpointError: A stored one is no group.
    """
    neighbours = np.arange(ins) // -(-ins // groups)
    if order is None or np.all((stored := _words(order)) == -1):
        return neighbours
    if np.any((stored < 0) | (stored >= groups)):
        raise CheckpointError(f"{name} must hold groups from 0 to {groups - 1}: {_AGAIN}")
    return stored


def _matrix(name: str, part: str, tensor: Any) -> tuple[int, int]:
    """Return the shape of a tensor, which must be a matrix of words."""
    if len(tensor.shape) != 2 or "int32" not in str(tensor.dtype):
        raise CheckpointError(
            f"{name}.{part} is {tensor.dtype} {list(tensor.shape)}, expected a matrix of int32"
        )
    return tuple(tensor.shape)


def _part(tensors: Mapping[str, Any], name: str, part: str) -> Any:
    """Return a stored tensor of a module.

    Raises:
        CheckpointError: It is missing.
    """
    tensor = tensors.get(f"{name}.{part}")
    if tensor is None:
        raise CheckpointError(f"{name}.{part} is missing: {_AGAIN}")
    return tensor


def _check(name: str, expected: Mapping[str, tuple[Any, tuple[int, ...]]]) -> None:
    """Raise for a tensor of another shape.

    Args:
        name: Name of the module.
        expected: Tensors, None for absent ones, and their shapes by the last parts of their names.
    """
    for part, (tensor, shape) in expected.items():
        if tensor is not None and tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"{name}.{part} is {list(tensor.shape)}, expected {list(shape)}: {_AGAIN}, with the"
                " config.json that was saved with them"
            )


def _only(name: str, values: list[Any], supported: tuple[Any, ...]) -> Any:
    """Return the one value of a field.

    Raises:
        CheckpointError: It is not supported, or there are several.
    """
    for value in values:
        if value not in supported or type(value) is not type(supported[0]):
            raise _refusal(name, value, " and ".join(map(repr, supported)))
    if len(set(values)) != 1:
        raise _refusal(name, values, "one for all weights")
    return values[0]


def _refusal(field: str, value: Any, supported: str) -> CheckpointError:
    """Return the error of a field whose value is not read here."""
    return CheckpointError(
        f"config.{CONFIG}.{field}={show_value(value)} is not read here, only {supported}: write the"
        " weights as bfloat16 with the library that quantised them"
    )
