# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Finds the files that paths, globs and directories stand for.

A directory stands for every file below it that is data or text (its first bytes are UTF-8); hidden
files are left out. Symbolic links are followed, and one that leads back to a directory above it is
refused. Files must be regular: a FIFO, a socket or a device cannot be read twice, and may block.

To read from another kind of bucket: register its prefix with `epath.register_path_cls`.
"""

from __future__ import annotations

import codecs
import errno
import glob
import logging
import os
import re
from collections.abc import Iterator, Sequence

from etils import epath

from jaxmoe.data.batch import DataError
from jaxmoe.data.reading.formats import DATA_SUFFIXES, index_file
from jaxmoe.disk import kind_of_special_file

logger = logging.getLogger(__name__)

_SNIFFED = 4096
_RECURSIVE = re.compile(r"(?P<root>(?:.*?/)?)\*\*(?:/|$)")
"""A glob that descends into directories of any depth; `root` is what precedes the first `**`."""


def find_files(paths: Sequence[str], field: str = "data.path") -> list[epath.Path]:
    """Return the files that match paths, each once, ordered by name.

    Args:
        paths: Files, globs or directories.
        field: Config field of the paths, for messages.

    Raises:
        DataError: A path matches no file, cannot be listed, or matches what is not a regular file.
    """
    found: dict[str, epath.Path] = {}
    for path in paths:
        spelled = f"{field}={path}"
        patterns = list(_without_braces(path))
        _check_prefixes(patterns, spelled)
        try:
            files = [file for pattern in patterns for file in _matches(pattern)]
        except DataError as error:
            raise DataError(f"{spelled}: {error}") from error
        except (OSError, ImportError, ValueError, NotImplementedError, RuntimeError) as error:
            raise DataError(f"{spelled} cannot be listed: {error}") from error
        if not files:
            exists = any(epath.Path(pattern).exists() for pattern in patterns)
            what = "holds no text" if exists else "matches no file"
            raise DataError(f"{spelled} {what} (from {os.getcwd()}): check it, and quote globs")
        for file in map(_data_file, files):
            _check_regular(file, spelled)
            found[absolute_name(file)] = file
    return [found[name] for name in sorted(found)]


def absolute_name(path: epath.Path) -> str:
    """Return a path that has a common directory with every other path."""
    return f"/{path}" if "://" in str(path) else os.path.abspath(path)


def _check_prefixes(patterns: Sequence[str], spelled: str) -> None:
    """Raise a DataError for a URL whose prefix `epath` does not read."""
    for pattern in patterns:
        try:
            epath.Path(pattern)
        except KeyError as error:
            raise DataError(
                f"{spelled} begins with {error.args[0]}, which is not read: expected a local path, "
                "or one that begins with gs://, s3://, az:// or hf://. Download the files, and "
                "give their local path (without file://)"
            ) from error


def _data_file(path: epath.Path) -> epath.Path:
    """The .bin of an .idx; any other file as it is."""
    if path.suffix != ".idx":
        return path
    data = path.with_suffix(".bin")
    if not data.exists():
        raise DataError(f"{path} has no {data.name} beside it, which holds its token ids")
    return data


def _check_regular(path: epath.Path, spelled: str) -> None:
    """Raise a DataError unless a local file, and its index if it has one, are regular files."""
    if "://" in str(path):
        return
    where = spelled if spelled.endswith(f"={path}") else f"{spelled}: {path}"
    try:
        kind = kind_of_special_file(path)
        index = index_file(path)
        if kind is None and path.suffix == ".bin" and os.path.lexists(index):
            where = f"{spelled}: {index}"
            kind = kind_of_special_file(index)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise DataError(
                f"{where} is a symbolic link that leads back to itself: expected a link to a file. "
                "Point it at the file, or remove it"
            ) from error
        raise DataError(f"{where} cannot be read: {error.strerror or error}") from error
    if kind is not None:
        raise DataError(
            f"{where} is {kind}: expected a regular file, which can be read more than once. Write "
            "its content to a file, and give that"
        )


def _matches(pattern: str) -> list[epath.Path]:
    """Return the files of one pattern without braces."""
    path = epath.Path(pattern).expanduser()
    if path.is_dir():
        return _text_below(path)
    if path.exists():
        return [path]
    if "://" in pattern:
        first = re.search(r"[^/]*[*?\[]", pattern)
        if first is None:
            return []
        root = pattern[: first.start()]
        tail = pattern[first.start() :]
        return [match for match in epath.Path(root).glob(tail) if not match.is_dir()]
    if recursive := _RECURSIVE.match(str(path)):  # `glob` follows loops of links without end
        for root in glob.glob(recursive["root"]) if recursive["root"] else ["."]:
            for _ in _directories(root):
                pass
    names = glob.glob(str(path), recursive=True)
    return [epath.Path(name) for name in names if not os.path.isdir(name)]


def _text_below(directory: epath.Path) -> list[epath.Path]:
    """Return the files of a directory that are data, or begin with text."""
    text_files = []
    binary = []
    special = []
    for path in _walk(directory):
        if "://" not in str(path) and kind_of_special_file(path) is not None:
            special.append(path)
        elif path.name.lower().endswith(DATA_SUFFIXES) or _is_text(path):
            text_files.append(path)
        else:
            binary.append(path)
    count = len(text_files) + len(binary) + len(special)
    reasons = ((binary, "text"), (special, "regular files, but FIFOs, sockets or devices"))
    for left_out, expected in reasons:
        if left_out:
            logger.warning(
                "%s: %d of %d files are left out because they are not %s, %s among them",
                directory,
                len(left_out),
                count,
                expected,
                left_out[0],
            )
    return text_files


def _walk(directory: epath.Path) -> Iterator[epath.Path]:
    """Yield every file below a directory that is not hidden; buckets have no recursive glob."""
    if "://" not in str(directory):
        for folder in map(epath.Path, _directories(str(directory))):
            yield from (p for p in folder.iterdir() if not (p.name.startswith(".") or p.is_dir()))
        return
    for path in directory.iterdir():
        if path.is_dir() and not path.name.startswith("."):
            yield from _walk(path)
        elif not path.name.startswith("."):
            yield path


def _directories(root: str) -> Iterator[str]:
    """Yield a local directory, and those below it that are neither hidden nor unreadable.

    Raises:
        DataError: A symbolic link leads back to a directory above it.
    """
    waiting: list[tuple[str, dict[tuple[int, int], str]]] = [(root, {})]
    while waiting:
        directory, above = waiting.pop()
        try:
            status = os.stat(directory)
            names = [name for name in os.listdir(directory) if not name.startswith(".")]
        except OSError:
            names = []
        else:
            key = status.st_dev, status.st_ino
            if key in above:
                raise DataError(
                    f"{directory} leads back to {above[key]}, which contains it, so that the files "
                    "below have no end: remove the symbolic link, or give the files"
                )
            above = {**above, key: directory}
        yield directory
        below = (os.path.join(directory, name) for name in names)
        waiting += [(path, above) for path in below if os.path.isdir(path)]


def _is_text(path: epath.Path) -> bool:
    with path.open("rb") as stream:
        start = stream.read(_SNIFFED)
    try:
        codecs.getincrementaldecoder("utf-8")().decode(start)
    except UnicodeDecodeError:
        return False
    return bool(start) and b"\0" not in start


def _without_braces(pattern: str) -> Iterator[str]:
    """Yield every alternative of `{a,b}`, as in a shell."""
    group = re.search(r"\{([^{}]*)\}", pattern)
    if group is None:
        yield pattern
        return
    for choice in group[1].split(","):
        yield from _without_braces(pattern[: group.start()] + choice + pattern[group.end() :])
