# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Safetensors files as a mapping from names to tensors that are read when asked for.

    one file          model.safetensors
    shards            model.safetensors.index.json, whose `weight_map` says which file holds what

Headers are read at once, so that names and shapes can be compared before any value is. PyTorch's
pickled files are not read: they run code.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from typing import Any

import numpy as np

from jaxmoe.checkpoint.manifest import CheckpointError
from jaxmoe.tracking.optional import require

INDEX = "model.safetensors.index.json"
_DTYPES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"}


@dataclasses.dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor on disk: shape and dtype are known, its values are read by `numpy.asarray`."""

    file: Any
    name: str
    shape: tuple[int, ...]
    dtype: str

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy  # every read is a fresh array
        values = self.file.get_tensor(self.name)
        return values if dtype is None else values.astype(dtype)


def open_tensors(path: str | os.PathLike[str]) -> dict[str, StoredTensor]:
    """The tensors of a directory, or of one file.

    Raises:
        CheckpointError: no safetensors there, a file that is missing or damaged, or a name in two
            files.
        MissingPackageError: safetensors is not installed.
    """
    path = pathlib.Path(path)
    found: dict[str, StoredTensor] = {}
    files = _files(path)
    for file in files:
        for name, tensor in _open(file).items():
            if name in found:
                raise CheckpointError(f"{path}: {name} is in two files, {file.name} and another")
            found[name] = tensor
    if path.is_dir() and (path / INDEX).exists():
        absent = sorted(_weight_map(path).keys() - found.keys())
        if absent:
            raise CheckpointError(
                f"{path / INDEX} names {len(absent)} tensors that no file holds, {absent[0]} first:"
                " download the files again"
            )
    return found


def _files(path: pathlib.Path) -> list[pathlib.Path]:
    """What to open: the file itself, the index's shards, or the one file of a directory."""
    if not path.is_dir():
        return [path]
    if (path / INDEX).exists():
        return [path / name for name in sorted(set(_weight_map(path).values()))]
    files = sorted(path.glob("*.safetensors"))
    if len(files) == 1:
        return files
    if files:
        raise CheckpointError(f"{path} holds {len(files)} safetensors files but no {INDEX}")
    pickled = sorted(file.name for file in path.glob("*.bin"))
    hint = f" but {pickled[0]}: save it again with safe_serialization=True" if pickled else ""
    raise CheckpointError(f"{path} holds no safetensors file{hint}")


def _weight_map(path: pathlib.Path) -> dict[str, str]:
    try:
        return dict(json.loads((path / INDEX).read_text(encoding="utf-8"))["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path / INDEX} is no index of safetensors: {error!r}") from error


def _open(file: pathlib.Path) -> dict[str, StoredTensor]:
    """Names and shapes of one file."""
    safetensors = require("safetensors", extra="hf")
    try:
        reader = safetensors.safe_open(file, framework="np")
        found = {}
        for name in reader.keys():
            about = reader.get_slice(name)
            stored = str(about.get_dtype())
            dtype = _DTYPES.get(stored, stored)
            found[name] = StoredTensor(reader, name, tuple(about.get_shape()), dtype)
        return found
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror or error}") from error
    except safetensors.SafetensorError as error:
        raise CheckpointError(
            f"{file} is no whole safetensors file ({error}): download it again"
        ) from error
