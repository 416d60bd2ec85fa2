# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Fills arrays of parameters with the values of tensors, and refuses values that are not finite."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxmoe.checkpoint.manifest import CheckpointError

_ROWS = 16
_ALIGNMENT = 64


class TensorPiece(NamedTuple):
    """Part of a parameter, and the part of a tensor that fills it."""

    key: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    part: tuple[Any, ...]
    """Index into the tensor; () is all of it."""
    target: tuple[Any, ...]
    """Index into the parameter."""
    is_transposed: bool


def fill_parameter(
    path: str, shape: tuple[int, ...], pieces: Sequence[TensorPiece], tensors: Mapping[str, Any]
) -> np.ndarray:
    """Return one parameter, or one part of it, f32; each tensor is read once.

    Args:
        path: Path of the parameter, for messages.
        shape: Its shape, or that of the part.
        pieces: Pieces that fill it.
        tensors: Tensors by name.

    Raises:
        CheckpointError: The pieces fill another number of values.
    """
    size = math.prod(shape)
    parameter = align(size).reshape(shape)
    filled = 0
    last = ""
    values = np.empty(0)
    for piece in sorted(pieces, key=lambda piece: piece.key):
        if piece.key != last:
            last = piece.key
            values = tensor_values(tensors[piece.key])
        source = values[piece.part]
        view = parameter[piece.target]
        if piece.is_transposed and source.ndim == 2:
            # Blocks of rows that fit the cache: five times as fast as one transpose.
            matrix = view.reshape(source.shape[::-1])  # a view
            for rows in range(0, len(source), _ROWS):
                block = source[rows : rows + _ROWS].astype(np.float32)
                matrix[:, rows : rows + _ROWS] = block.T
        else:
            view[...] = source.reshape(view.shape)
        filled += view.size
    if filled != size:
        raise CheckpointError(f"{path}: the family's rules fill {filled} of {size} values")
    return parameter


def check_finite(
    parameter: np.ndarray, pieces: Sequence[TensorPiece], tensors: Mapping[str, Any]
) -> None:
    """Raise for the first tensor with a value that is NaN or infinite.

    Args:
        parameter: Values that were filled.
        pieces: Pieces that filled them.
        tensors: Tensors by name.

    Raises:
        CheckpointError: There is such a value.
    """
    # NaN is the minimum and the maximum of its array: no array of booleans as large is needed.
    if not parameter.size or np.isfinite(parameter.min()) and np.isfinite(parameter.max()):
        return
    for piece in pieces:
        view = parameter[piece.target]
        wrong = view.size - np.count_nonzero(np.isfinite(view))
        if wrong:
            file = getattr(tensors[piece.key], "file", None)
            raise CheckpointError(
                f"{f'{file}: ' if file else ''}{piece.key} holds {wrong} of {view.size} values that"
                " are NaN, infinite or too large for float32: download it again, or import it as it"
                ' is with nonfinite="keep" (--imported.nonfinite keep)'
            )


def align(size: int, dtype: Any = np.float32) -> np.ndarray:
    """Return aligned memory, which a CPU device uses without a copy.

    Args:
        size: Number of values.
        dtype: Dtype of the values.
    """
    num_bytes = size * np.dtype(dtype).itemsize
    raw = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    first = -raw.ctypes.data % _ALIGNMENT
    return raw[first : first + num_bytes].view(dtype)


def tensor_values(tensor: Any) -> np.ndarray:
    """Return the values of a tensor, floats of any width.

    Args:
        tensor: Of PyTorch, or anything that numpy reads.
    """
    if hasattr(tensor, "detach"):  # PyTorch; numpy cannot read its bfloat16
        tensor = tensor.detach().cpu().float().numpy()
    return np.asarray(tensor)
