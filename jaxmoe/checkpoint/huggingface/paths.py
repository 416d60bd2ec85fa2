# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Finds and parses the files of a directory that may come from an untrusted source.

Only plain files inside the directory are read: a name with `..`, an absolute name, a link that
leaves the directory, a FIFO or a device is refused. One kind of link may leave it, that of the
cache of huggingface_hub, where `snapshots/<revision>/<name>` points to a file in `blobs` of the
same model:

    models--org--name/blobs/<hash>
    models--org--name/snapshots/<revision>/config.json -> ../../blobs/<hash>
"""

from __future__ import annotations

import json
import os
import pathlib
import stat
from typing import Any

from jaxmoe.checkpoint.manifest import CheckpointError
from jaxmoe.json_bounds import MAX_JSON_BYTES, NotTextError, read_json

_AGAIN = "download the files again"


def plain_file(
    directory: pathlib.Path, name: str, *, named_in: pathlib.Path | None = None
) -> pathlib.Path:
    """Return the path of a file of a directory.

    Args:
        directory: Directory of the model.
        name: Name of the file relative to the directory.
        named_in: File that holds the name, for messages.

    Raises:
        CheckpointError: The name or a link leaves the directory, or the file is missing or is not
            a plain file.
    """
    parts = pathlib.PurePath(name).parts
    is_inside = bool(parts) and ".." not in parts and not os.path.isabs(name)
    if not is_inside or not name.isprintable():
        raise CheckpointError(
            f"{named_in or directory} names the file {show_value(name)}, which is not inside"
            f" {directory}: {_AGAIN} from a source that you trust"
        )
    path = directory / name
    try:
        root = pathlib.Path(os.path.realpath(directory, strict=True))
        real = pathlib.Path(os.path.realpath(path, strict=True))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    if not real.is_relative_to(root) and real.parent != _blobs_of(root):
        raise CheckpointError(
            f"{path} is a link to {real}, outside {directory}: copy the file to {directory} if it"
            " belongs to the model"
        )
    return check_plain(path)


def _blobs_of(root: pathlib.Path) -> pathlib.Path | None:
    """Return the blobs of a resolved directory in the hub's cache; None outside it."""
    for folder in (root, *root.parents):
        snapshots = folder.parent
        if snapshots.name == "snapshots" and snapshots.parent.name.startswith("models--"):
            return snapshots.parent / "blobs"
    return None


def check_plain(path: pathlib.Path) -> pathlib.Path:
    """Return the path of a plain file, or of a link to one.

    Raises:
        CheckpointError: The file is missing, or it is a directory, FIFO, socket or device.
    """
    try:
        mode = path.stat().st_mode
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, before Python 3.13
        why = getattr(error, "strerror", None) or error
        raise CheckpointError(f"cannot read {path}: {why}") from error
    if not stat.S_ISREG(mode):
        kind = "a directory" if stat.S_ISDIR(mode) else "a FIFO, socket or device"
        raise CheckpointError(f"{path} is {kind}, not a plain file: {_AGAIN}")
    return path


def read_object(path: pathlib.Path, *, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Return the JSON object in a plain file.

    Args:
        path: File to read, found by `plain_file` or `check_plain`.
        max_bytes: Largest size of the file.

    Raises:
        CheckpointError: The file cannot be read, is too large or too deep, or holds no object.
    """
    try:
        value = read_json(path, max_bytes=max_bytes)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    except (json.JSONDecodeError, NotTextError) as error:
        raise CheckpointError(f"{path} is not JSON ({error}): {_AGAIN}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not parsed ({error}): {_AGAIN}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds {kind_of(value)}, not a JSON object: {_AGAIN}")
    return value


def show_value(value: Any) -> str:
    """Return a value from a file as Python writes it, cut to 100 characters."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


def kind_of(value: Any) -> str:
    """Return the JSON type of a value with its article."""
    kinds = {bool: "a boolean", int: "an integer", float: "a number", str: "a string"}
    kinds |= {dict: "an object", list: "a list", type(None): "null"}
    return kinds.get(type(value), f"a {type(value).__name__}")
