# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""What a disk does to a run: files are there whole or not at all, and a full disk ends nothing.

`replace_file` writes to a temporary file in the same directory, flushes it to the disk and puts
it in the place of the old one with one rename. `DiskGuard` turns what the disk refuses into one
warning: a run must not die of its own diary. Checkpoints have their own protocol, and their own
errors (`jaxmoe/checkpoint/`). What can be made again (compiled programs, tokens) lies in
`cache_directory`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
from collections.abc import Iterator

logger = logging.getLogger(__name__)


def cache_directory() -> pathlib.Path:
    """$XDG_CACHE_HOME/jaxmoe, by default ~/.cache/jaxmoe."""
    home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(home) / "jaxmoe"


def replace_file(path: str | os.PathLike[str], data: bytes | str) -> None:
    """Write a file in one piece.

    Args:
        path: The file, new or to be replaced; its directory is made if need be.
        data: Its bytes, or its text (written as UTF-8).

    Raises:
        OSError: If it cannot be written; the old file is then as it was.
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


class DiskGuard:
    """Lets the run go on without a file that the disk does not take, and says so once.

    Args:
        path: The file or directory, for the message.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self._path = path
        self._has_warned = False

    @contextlib.contextmanager
    def going_on(self) -> Iterator[None]:
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
