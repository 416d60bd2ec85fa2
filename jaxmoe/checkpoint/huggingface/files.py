# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Reads and writes safetensors files, one tensor at a time.

    one file          model.safetensors, whatever other files are beside it but an index
    shards            model.safetensors.index.json, whose `weight_map` maps tensors to files

All headers are read first, so that names and shapes can be compared before any value is read.
PyTorch's pickled files are not read, because reading them executes code. Files are written
sequentially: a header (its length, 8 bytes; JSON with dtype, shape and offsets of each tensor),
then the values.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxmoe.checkpoint.huggingface.paths import (
    check_plain,
    kind_of,
    plain_file,
    read_object,
    show_value,
)
from jaxmoe.checkpoint.manifest import CheckpointError
from jaxmoe.optional import require

_MAX_INDEX_BYTES = 1 << 28
INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
_DTYPES = {
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "U8": "uint8",
    "I32": "int32",
    "I64": "int64",
}


@dataclasses.dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor on disk with known shape and dtype; `numpy.asarray` reads its values."""

    file: pathlib.Path
    start: int
    """Offset of its values in the file, bytes."""
    shape: tuple[int, ...]
    dtype: str

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy  # every read makes a new array
        kind = jnp.dtype(self.dtype)
        size = math.prod(self.shape)
        # Not mapped: mapped pages stay in memory until the whole file is there.
        values = np.fromfile(self.file, kind, size, offset=self.start).reshape(self.shape)
        return values if dtype is None else values.astype(dtype)


def open_tensors(path: str | os.PathLike[str]) -> dict[str, StoredTensor]:
    """Return the tensors of a directory, or of one file.

    Raises:
        CheckpointError: There are no safetensors files, one is missing, damaged or not a plain
            file inside the directory, or two files hold the same name.
        MissingPackageError: safetensors is not installed.
    """
    path = pathlib.Path(path)
    tensors: dict[str, StoredTensor] = {}
    weight_map = _weight_map(path) if path.is_dir() and (path / INDEX).exists() else {}
    for file in _files(path, weight_map):
        for name, tensor in _open(file).items():
            if name in tensors:
                raise CheckpointError(
                    f"{path}: {show_value(name)} is in two files, {file.name} and another"
                )
            tensors[name] = tensor
    absent = sorted(weight_map.keys() - tensors.keys())
    if absent:
        raise CheckpointError(
            f"{path / INDEX} names {len(absent)} tensors that no file holds, {absent[0]} first:"
            " download the files again"
        )
    return tensors


def _files(path: pathlib.Path, weight_map: Mapping[str, str]) -> list[pathlib.Path]:
    """Return the files to open: the path itself, or the shards or the one file in it."""
    if not path.is_dir():
        return [check_plain(path)]
    if weight_map:
        names = sorted(set(weight_map.values()))
        return [plain_file(path, name, named_in=path / INDEX) for name in names]
    if (path / WHOLE).exists():  # transformers reads it, whatever else is there
        return [plain_file(path, WHOLE)]
    files = sorted(path.glob("*.safetensors"))
    if len(files) == 1:
        return [plain_file(path, files[0].name)]
    if files:
        raise CheckpointError(f"{path} holds {len(files)} safetensors files but no {INDEX}")
    pickled = sorted(file.name for file in path.glob("*.bin"))
    hint = f" but {pickled[0]}: save it again with safe_serialization=True" if pickled else ""
    raise CheckpointError(f"{path} holds no safetensors file{hint}")


def _weight_map(path: pathlib.Path) -> dict[str, str]:
    """Return the file of each tensor as the index of a directory names it."""
    file = plain_file(path, INDEX)
    weight_map = read_object(file, max_bytes=_MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        kind = "an empty object" if weight_map == {} else kind_of(weight_map)
        raise CheckpointError(
            f"{file}: weight_map is {kind} and must map tensors to files: download the files again"
        )
    for name, place in weight_map.items():
        if not isinstance(place, str) or not name.isprintable():
            raise CheckpointError(
                f"{file}: weight_map[{show_value(name)}]={show_value(place)} must be the name of"
                f" a file, and"
                f" it is {kind_of(place)}: download the files again"
            )
    return weight_map


def _open(file: pathlib.Path) -> dict[str, StoredTensor]:
    """Return the tensors of one file."""
    safetensors = require("safetensors", extra="hf")
    try:
        with safetensors.safe_open(file, framework="np"):  # validates the header
            pass
        with open(file, "rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header: dict[str, Any] = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        return {
            name: StoredTensor(
                file,
                8 + length + entry["data_offsets"][0],
                tuple(entry["shape"]),
                _DTYPES.get(str(entry["dtype"]), str(entry["dtype"])),
            )
            for name, entry in header.items()
        }
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror or error}") from error
    except safetensors.SafetensorError as error:
        raise CheckpointError(
            f"{file} is no whole safetensors file ({error}): download it again"
        ) from error


class Planned(NamedTuple):
    """A tensor to write."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Size on disk."""
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


def write_tensors(
    directory: pathlib.Path,
    planned: Mapping[str, Planned],
    values: Callable[[str], np.ndarray],
    *,
    max_shard_bytes: int,
) -> None:
    """Write tensors to one file, or to several files and an index.

    Args:
        directory: Existing directory.
        planned: Tensors to write, in order.
        values: Function from a name to values of any float dtype; called once each, in order.
        max_shard_bytes: Largest size of a file; a larger tensor has its own file.
    """
    shards = _shards(planned, max_shard_bytes)
    places = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        file = file if len(shards) > 1 else WHOLE
        write_file(directory / file, {name: planned[name] for name in names}, values)
        places |= dict.fromkeys(names, file)
    if len(shards) > 1:
        total = sum(tensor.num_bytes for tensor in planned.values())
        index = {"metadata": {"total_size": total}, "weight_map": places}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (directory / INDEX).write_text(text, encoding="utf-8")


def _shards(planned: Mapping[str, Planned], max_shard_bytes: int) -> Sequence[Sequence[str]]:
    """Return the names in each file, in order."""
    shards = [[]]
    num_bytes = 0
    for name, tensor in planned.items():
        if shards[-1] and num_bytes + tensor.num_bytes > max_shard_bytes:
            shards.append([])
            num_bytes = 0
        shards[-1].append(name)
        num_bytes += tensor.num_bytes
    return shards


def write_file(
    file: pathlib.Path, planned: Mapping[str, Planned], values: Callable[[str], np.ndarray]
) -> None:
    """Write tensors to one file; see `write_tensors`."""
    names = {dtype: name for name, dtype in _DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in planned.items():
        start = end
        end = end + tensor.num_bytes
        entry = {"dtype": names[tensor.dtype], "shape": list(tensor.shape)}
        header[name] = entry | {"data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # values begin at a multiple of 8
    with open(file, "wb") as stream:
        stream.write(len(text).to_bytes(8, "little"))
        stream.write(text)
        for name, tensor in planned.items():
            array = np.ascontiguousarray(values(name), dtype=jnp.dtype(tensor.dtype))
            assert array.shape == tensor.shape, (name, array.shape, tensor.shape)
            stream.write(array.reshape(-1).view(np.uint8).data)
