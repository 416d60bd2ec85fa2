# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Writes files in one piece, and keeps a run going when a log file cannot be written.

`replace_file` writes a temporary file in the same directory, flushes it and renames it over the old
one. `DiskGuard` turns errors of the disk into one warning, for files that a run can do without.
Checkpoints have their own protocol and errors (`jaxmoe/checkpoint/`). Compiled programs and
tokenized data are kept in `cache_directory`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
import re
import stat
from collections.abc import Iterable, Iterator

from jaxmoe.errors import printable

logger = logging.getLogger(__name__)

_SPECIAL_FILES = {
    stat.S_IFIFO: "a FIFO (named pipe)",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFDIR: "a directory",
}
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_COPY = {
    "gs": "`gcloud storage rsync --recursive runs/mine {}` (the two swapped: back)",
    "s3": "`aws s3 sync runs/mine {}` (the two swapped: back)",
}
"""Command that copies a directory into an object store, by scheme."""
_TEMPORARY = re.compile(r"\..+\.\d+\.tmp")
"""Names of the temporary files of `replace_file`."""


def cache_directory() -> pathlib.Path:
    """Return $XDG_CACHE_HOME/jaxmoe, by default ~/.cache/jaxmoe."""
    home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(home) / "jaxmoe"


def check_local(name: str, path: str | os.PathLike[str]) -> None:
    """Refuse a path that is no place for a run: a URL, or a name that is not UTF-8.

    Records of a run name its directory, and JSON, HTML and terminals hold UTF-8.

    Args:
        name: What the path is, for the message.
        path: Path that is to be written, or read with file operations.

    Raises:
        ValueError: It is a URL, or it or a directory above it has bytes that are no UTF-8.
    """
    text = os.fspath(path)
    if not is_text(absolute := os.path.abspath(text)):
        raise ValueError(
            f"{name}={printable(text)} is not UTF-8 ({printable(absolute)}), and the files of a run"
            " name it: rename the directory"
        )
    if (scheme := _URL.match(text)) is None:
        return
    tool = _COPY.get(scheme[1], "the tool of that store")
    raise ValueError(
        f"{name}={text} is not in a file system, and runs and checkpoints need one (rename, append,"
        f" leases): give a local directory, such as runs/mine, and copy it with {tool.format(text)}"
    )


def is_text(name: str) -> bool:
    """Return whether a name is text: not bytes that are no UTF-8, which Python reads as halves.

    Args:
        name: Word of a command line, or name of a file.
    """
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def kind_of_special_file(path: str | os.PathLike[str]) -> str | None:
    """Return what a local path is, such as "a socket"; None for a regular file.

    Raises:
        OSError: The path does not exist, or is a symbolic link that leads to itself.
    """
    return kind_of_mode(os.stat(path).st_mode)


def kind_of_mode(mode: int) -> str | None:
    """Return what a path of this `st_mode` is, such as "a socket"; None for a regular file."""
    return None if stat.S_ISREG(mode) else _SPECIAL_FILES.get(stat.S_IFMT(mode), "a special file")


def check_plain_files(paths: Iterable[pathlib.Path]) -> None:
    """Refuse paths that exist and are no plain files: opening a FIFO would wait for its writer.

    Raises:
        ValueError: One is a directory, a FIFO or the like; the message names it.
    """
    for path in paths:
        if path.exists() and (kind := kind_of_special_file(path)) is not None:
            raise ValueError(f"{path} is {kind}, and must be a plain file: move it away")


def replace_file(path: str | os.PathLike[str], data: bytes | memoryview | str) -> None:
    """Write a file in one piece.

    Args:
        path: The file, new or to be replaced; its directory is made if need be.
        data: Its bytes, or its text (written as UTF-8).

    Raises:
        OSError: The file cannot be written; the old one is unchanged.
    """
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def remove_leftovers(directory: str | os.PathLike[str]) -> None:
    """Remove the temporary files of `replace_file` that killed processes have left.

    Args:
        directory: Directory that this process holds alone.
    """
    for path in pathlib.Path(directory).glob(".*.tmp"):
        if _TEMPORARY.fullmatch(path.name) and path.is_file():
            with contextlib.suppress(OSError):
                path.unlink()


class DiskGuard:
    """Warns once, instead of ending the run, when a file cannot be written.

    Args:
        path: The file or directory, for the message.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self._path = path
        self._has_warned = False

    @contextlib.contextmanager
    def warning_once(self) -> Iterator[None]:
        """Run a block; an `OSError` in it becomes a warning the first time, then nothing."""
        try:
            yield
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "%s cannot be written (%s): the run goes on, this record has gaps",
                    self._path,
                    error.strerror,
                )
