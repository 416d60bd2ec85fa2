# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Checks the place of what a command writes at its end, before the work for it begins."""

from __future__ import annotations

import pathlib
import tempfile
from typing import Literal


def check_new_path(field: str, path: str, kind: Literal["file", "directory"]) -> None:
    """Refuse a path that exists or cannot be made; make the directories above it.

    Args:
        field: Field of the path, for the message.
        path: Path to make later; a first `~` is the home directory.
        kind: What it will be, for the message.

    Raises:
        ValueError: It exists, or the directory above it cannot be made or written.
    """
    target = pathlib.Path(path).expanduser()
    try:
        if target.exists():
            raise ValueError(f"{field}={path} exists: choose a new {kind}")
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=target.parent):
            pass
    except OSError as error:
        raise ValueError(
            f"{field}={path} cannot be made ({error.strerror or error}): choose another {kind}"
        ) from error
