# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Paths for Orbax whose directories may have glob characters in their names.

`epath.Path.glob` joins the directory to the pattern, so that `[`, `]`, `*` and `?` of the directory
become a pattern as well: Orbax then finds none of the files that it merges, and commits a step
without its arrays.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from typing import Any

from etils import epath
from etils.epath import gpath

from jaxmoe.disk import check_local


def literal_path(path: Any) -> epath.Path:
    """Return the absolute path of a directory, in which `glob` takes only its argument as pattern.

    Args:
        path: Local directory.

    Raises:
        ValueError: The path is in an object store.
    """
    check_local("directory", path)
    return _LiteralPath(epath.Path(path).expanduser().absolute())


class _LiteralPath(gpath.PosixGPath):
    """Local path; paths derived from it are of this class."""

    def glob(self, pattern: str) -> Iterator[_LiteralPath]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Yield the files below this directory that match."""
        for name in sorted(glob.glob(pattern, root_dir=os.fspath(self))):
            yield self / name
