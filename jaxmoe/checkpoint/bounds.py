# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Checks the files of a step before Orbax or TensorStore opens them.

A checkpoint may come from an untrusted source, and its checksums can be forged. A step is refused
if it holds

    links and special files      they point to other files of the machine, or never end
    large or deep JSON           more than MAX_JSON_BYTES, MAX_JSON_VALUES or MAX_JSON_DEPTH
    other readers                names of classes that Orbax would look up
    other names                  names with dots or slashes, or names that the manifest lacks
    other arrays                 shape, dtype or chunks that differ from the manifest
    too many bytes               files larger than its arrays need

TensorStore (0.1.86) stops a zstd chunk that expands beyond the size in the array's description, so
that the description, which is compared here, bounds what is allocated.

To add a check: `jaxmoe/checkpoint/bounds.py` (lines that `contents` returns),
`tests/faults/test_hostile.py` (a step that it refuses).
"""

from __future__ import annotations

import importlib
import json
import math
import os
import pathlib
import re
import stat
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxmoe.host_memory import machine_memory
from jaxmoe.json_bounds import (
    MAX_JSON_BYTES,
    MAX_JSON_DEPTH,
    NotTextError,
    parse_json,
    read_json,
)

MAX_ARRAY_BYTES = 1 << 50
"""Largest size of one array."""

MAX_DESCRIPTION = 1 << 16
"""Largest description of an array in the store, bytes."""

_MANIFEST = pathlib.PurePath("manifest", "metadata")
_STORE = pathlib.PurePath("state", "_METADATA")
_HANDLERS = "_CHECKPOINT_METADATA"
_JSON = ("files.json", _HANDLERS, "manifest/*", "state/_*", "state/array_metadatas/*")
_READERS = ("JsonCheckpointHandler", "StandardCheckpointHandler", "PyTreeCheckpointHandler")
_READERS_ARE_OF = "orbax.checkpoint."


def places(step: pathlib.Path) -> list[str]:
    """Return one line for each entry of a step that is neither a file nor a directory."""
    lines = []
    for root, directories, files in os.walk(step):
        for name in (*directories, *files):
            path = pathlib.Path(root, name)
            mode = path.lstat().st_mode
            shown = path.relative_to(step).as_posix()
            if stat.S_ISLNK(mode):
                lines.append(f"{shown}: a link, which checkpoints do not contain")
            elif not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                lines.append(f"{shown}: neither a file nor a directory")
    return sorted(lines)


def texts(step: pathlib.Path, patterns: Sequence[str] = _JSON) -> list[str]:
    """Return one line for each JSON file of a step that must not be parsed.

    Args:
        step: Directory of the step.
        patterns: Glob patterns of the files to check.
    """
    lines = []
    for pattern in patterns:
        for path in sorted(step.glob(pattern)):
            if not path.is_file() or path.name == "commit_success.txt":
                continue
            name = path.relative_to(step).as_posix()
            try:
                data = read_json(path)
                if name == "files.json" and isinstance(inner := data.get("files"), str):
                    parse_json(inner)
            except (OSError, ValueError, AttributeError) as error:
                lines.append(f"{name}: {str(error)[:200]}")
    return lines


def before_opening(directory: pathlib.Path) -> list[str]:
    """Return one line for each step that Orbax must not list: listing parses a file of each.

    Files that are no text, or not JSON, are skipped: Orbax ignores them, and the check of the step
    finds them.
    """
    lines = []
    for path in sorted(directory.glob(f"*/{_HANDLERS}")):
        if not path.parent.name.isdigit():
            continue  # not committed, or set aside: never opened
        name = path.relative_to(directory).as_posix()
        try:
            if path.is_symlink() or not path.is_file():
                raise ValueError("not a plain file")
            if not isinstance(read_json(path), dict | None):
                raise ValueError("not a JSON object")
        except (json.JSONDecodeError, NotTextError):
            continue
        except (OSError, ValueError) as error:
            lines.append(f"{name}: {str(error)[:200]}; move the step away")
    return lines


def contents(step: pathlib.Path, *, has_store: bool = True) -> list[str]:
    """Return one line for each difference between the files of a step and its manifest.

    Args:
        step: Directory of the step; `places` and `texts` must have found nothing.
        has_store: Whether the store of the arrays is compared, too.
    """
    if not (step / _MANIFEST).is_file():
        return []  # written by another tool, which is refused elsewhere
    manifest = read_json(step / _MANIFEST)
    if not isinstance(manifest, dict) or not isinstance(manifest.get("schema"), int):
        return []
    arrays = manifest.get("arrays")
    lines = _describe(arrays)
    if lines or not isinstance(arrays, dict):
        return lines
    needed = sum(map(_bytes_of, arrays.values()))
    num_bytes = sum(path.stat().st_size for path in step.rglob("*") if path.is_file())
    if num_bytes > 2 * needed + 8 * MAX_JSON_BYTES:
        return [f"its files have {num_bytes} bytes, and its arrays need {needed}"]
    lines = [*_handlers(step), *_names(step, arrays)]
    return lines or (_store(step, arrays) if has_store else [])


def beyond_memory(arrays: Mapping[str, Any]) -> str:
    """Return why arrays do not fit in the memory of this host; empty if they do.

    Args:
        arrays: Arrays of a manifest in which `contents` found nothing.
    """
    needed = sum(map(_bytes_of, arrays.values()))
    memory = machine_memory()
    if needed <= memory:
        return ""
    return f"its arrays need {needed} bytes, and this host has {memory}: restore it to a target"


def _describe(arrays: Any) -> list[str]:
    """Return one line for each invalid array of a manifest."""
    if not isinstance(arrays, dict):
        return ["manifest/metadata: its arrays are not a JSON object"]
    lines = []
    for path, array in arrays.items():
        parts = path.split("/")
        if not all(parts) or "." in path or len(parts) > MAX_JSON_DEPTH or "\0" in path:
            lines.append(f"manifest/metadata: {path[:100]!r} is not a valid name of an array")
            continue
        shape = array.get("shape") if isinstance(array, dict) else None
        is_shape = isinstance(shape, list) and all(
            type(size) is int and 0 <= size for size in shape
        )
        if not is_shape or _dtype(array.get("dtype")) is None:
            lines.append(f"manifest/metadata: {path} has no valid shape or dtype")
        elif _bytes_of(array) > MAX_ARRAY_BYTES:
            lines.append(f"manifest/metadata: {path} needs {_bytes_of(array)} bytes")
    return lines


def _dtype(name: Any) -> np.dtype | None:
    if not isinstance(name, str):
        return None
    try:
        return np.dtype(np.uint32) if name == "key" else jnp.dtype(name)
    except TypeError:
        return None


def _bytes_of(array: Mapping[str, Any]) -> int:
    dtype = _dtype(array["dtype"])
    assert dtype is not None
    return math.prod(array["shape"]) * dtype.itemsize


def _handlers(step: pathlib.Path) -> list[str]:
    """Return one line for each unknown reader; the checksums do not cover this file."""
    if not (step / _HANDLERS).exists():
        return []
    data = read_json(step / _HANDLERS)
    handlers = data.get("item_handlers") if isinstance(data, dict) else None
    if not isinstance(handlers, dict):
        return [f"{_HANDLERS}: names no readers"]
    return [
        f"{_HANDLERS}: asks for the reader {str(name)[:100]!r} of {item[:100]!r}"
        for item, name in handlers.items()
        if item not in ("state", "manifest")
        or not isinstance(name, str)
        or not name.startswith(_READERS_ARE_OF)
        or name.rpartition(".")[2] not in _READERS
    ]


def _names(step: pathlib.Path, arrays: Mapping[str, Any]) -> list[str]:
    """Return the differences between the names in Orbax's metadata and in the manifest."""
    name = _STORE.as_posix()
    if not (step / _STORE).exists():
        return [f"{name}: missing"]
    data = read_json(step / _STORE)
    tree = data.get("tree_metadata") if isinstance(data, dict) else None
    if not isinstance(tree, dict) or data.get("use_zarr3") or not data.get("use_ocdbt"):
        return [f"{name}: describes a store that jaxmoe does not write"]
    names = set()
    for text, entry in tree.items():
        try:
            keys = [key["key"] for key in entry["key_metadata"]]
        except (TypeError, KeyError):
            keys = []
        if not keys or not all(isinstance(key, str) for key in keys) or repr(tuple(keys)) != text:
            return [f"{name}: {text[:100]} is not a valid name of an array"]
        names.add("/".join(keys))
    lines = [f"{name}: {path[:100]!r} is not in the manifest" for path in names - arrays.keys()]
    return sorted(lines + [f"{name}: {path} is missing" for path in arrays.keys() - names])


def _store(step: pathlib.Path, arrays: Mapping[str, Any]) -> list[str]:
    """Return the differences between the arrays of the store and of the manifest."""
    ts = importlib.import_module("tensorstore")  # a dependency of Orbax
    if not (step / "state" / "manifest.ocdbt").exists():
        return ["state/manifest.ocdbt: missing"]
    by_name = {path.replace("/", "."): path for path in arrays}
    base = {"driver": "file", "path": f"{step}/state/"}
    lines = list[str]()
    try:
        store = ts.KvStore.open({"driver": "ocdbt", "base": base}).result()
        keys: list[str] = [key.decode(errors="replace") for key in store.list().result()]
        for name, path in by_name.items():
            value = store.read(f"{name}/.zarray").result().value
            if len(value) > MAX_DESCRIPTION:
                lines.append(f"{path}: its description in the store has {len(value)} bytes")
                continue
            wrong = differs_in_store(parse_json(value.decode()), arrays[path])
            lines += [f"{path}: {wrong}"] if wrong else []
        for key in keys:
            name, _, chunk = key.rpartition("/")
            if name not in by_name or not re.fullmatch(r"\.zarray|\d+(\.\d+)*", chunk):
                lines.append(f"state: {key[:100]!r} is not an array of the manifest")
    except (ValueError, OSError, KeyError, TypeError, AttributeError) as error:
        lines.append(f"state: cannot be read ({str(error).splitlines()[0][:200]})")
    return lines


def differs_in_store(stored: Mapping[str, Any], array: Mapping[str, Any]) -> str:
    """Return the difference between a stored array and the manifest; empty if there is none."""
    dtype = _dtype(array["dtype"])
    assert dtype is not None
    shape = stored["shape"]
    chunk = stored["chunks"]
    compressor = stored["compressor"]
    if shape != array["shape"] or _zarr_dtype(stored["dtype"]) != dtype:
        saved = f"{array['dtype']}{array['shape']}"
        return f"the store has {stored['dtype']}{shape}, the manifest {saved}"[:300]
    is_ours = (
        len(chunk) == len(shape)
        and all(type(c) is int and 0 < c <= max(1, s) for c, s in zip(chunk, shape, strict=True))
        and (compressor is None or compressor.get("id") == "zstd")
        and stored.get("filters") is None
        and stored["zarr_format"] == 2
    )
    if not is_ours:
        return f"the store has chunks {chunk} for {shape}, by {compressor}"[:300]
    return ""


def _zarr_dtype(name: Any) -> np.dtype | None:
    """Return the dtype of a name such as `<f4` or `bfloat16`."""
    if not isinstance(name, str):
        return None
    return np.dtype(name) if re.fullmatch(r"[<|][a-z]\d", name) else _dtype(name)
