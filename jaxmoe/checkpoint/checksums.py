# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Lists the size and CRC-32 of each file of a step, and finds files that have changed.

    <step>/files.json    {"files": {name: [size, crc32]}}, and the CRC-32 of that text

The list is written last before a step is committed, without the files that the commit writes. A
CRC finds accidental damage (all bursts of up to 32 bits), not forgery.
"""

from __future__ import annotations

import json
import os
import pathlib
import zlib
from collections.abc import Iterator
from typing import Any

LIST = "files.json"
# The commit adds the first file and writes a time to the second; a step without them is damaged.
OF_THE_COMMIT = ("commit_success.txt", "_CHECKPOINT_METADATA")
_CHUNK = 1 << 22


def write_list(step: Any) -> None:
    """Write the list of the files of a complete step.

    Args:
        step: Directory of the step.
    """
    step = pathlib.Path(step)
    text = json.dumps({name: _measure(step / name) for name in sorted(_names(step))})
    content = json.dumps({"crc32": zlib.crc32(text.encode()), "files": text})
    pending = step / f"{LIST}.tmp"
    with pending.open("w", encoding="utf-8") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    pending.replace(step / LIST)


def damage(step: Any) -> list[str]:
    """Return one line for each file of a step that is missing, unexpected or changed.

    Args:
        step: Directory of the step.
    """
    step = pathlib.Path(step)
    if not (step / LIST).exists():
        return [f"{LIST}: missing, the list of files"]
    listed = _read_list(step)
    if listed is None:
        return [f"{LIST}: the list of files is damaged"]
    names = set(_names(step))
    lines = []
    for name, (size, crc) in listed.items():
        if name not in names:
            lines.append(f"{name}: missing")
            continue
        length = (step / name).stat().st_size
        if length != size:
            lines.append(f"{name}: {length} bytes, {size} were written")
        elif _measure(step / name)[1] != crc:
            lines.append(f"{name}: its content has changed ({size} bytes)")
    return [*lines, *(f"{name}: was not written with it" for name in sorted(names - set(listed)))]


def whole_files(step: Any) -> list[str] | None:
    """Return the names of the files that are as they were written; None if the list is damaged.

    Args:
        step: Directory of the step.
    """
    step = pathlib.Path(step)
    listed = _read_list(step)
    if listed is None:
        return None
    names = sorted(listed.keys() & set(_names(step)))
    return [name for name in names if _is_whole(step / name, listed[name])]


def _is_whole(path: pathlib.Path, record: list[int]) -> bool:
    try:
        return path.stat().st_size == record[0] and list(_measure(path)) == record
    except OSError:  # such as a bad sector
        return False


def _read_list(step: pathlib.Path) -> dict[str, list[int]] | None:
    """Return size and CRC-32 by name; None if the list is missing or damaged."""
    try:
        outer = json.loads((step / LIST).read_text(encoding="utf-8"))
        is_whole = zlib.crc32(outer["files"].encode()) == outer["crc32"]
        return json.loads(outer["files"]) if is_whole else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _names(step: pathlib.Path) -> Iterator[str]:
    for path in _walk(step):
        name = path.relative_to(step).as_posix()
        if not path.is_dir() and name not in (LIST, f"{LIST}.tmp", *OF_THE_COMMIT):
            yield name


def _walk(step: pathlib.Path) -> Iterator[pathlib.Path]:
    for root, directories, files in os.walk(step):
        yield from (pathlib.Path(root, name) for name in (*directories, *files))


def _measure(path: pathlib.Path) -> tuple[int, int]:
    """Return size and CRC-32."""
    size = crc = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            size = size + len(chunk)
            crc = zlib.crc32(chunk, crc)
    return size, crc
