# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""A run directory that a conversion makes, which appears whole or not at all; and what it says of
the model that came from elsewhere."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
from collections.abc import Iterator

from jaxmoe.run.config import PretrainConfig
from jaxmoe.run.directory import RunDirectory


def length_of(directory: RunDirectory, config: PretrainConfig) -> int:
    """Positions that the model of a run is for: what an imported one says, or a training row.

    Args:
        directory: of the run.
        config: of the run.
    """
    return _imported(directory, "max_length") or config.training.sequence_length


def first_token_of(directory: RunDirectory) -> int | None:
    """The id that begins a text for an imported model which has one.

    Args:
        directory: of the run.
    """
    return _imported(directory, "bos_token_id")


def _imported(directory: RunDirectory, field: str) -> int | None:
    value = (directory.summary() or {}).get(field)
    return value if isinstance(value, int) else None


@contextlib.contextmanager
def new_run(target: pathlib.Path, config: PretrainConfig) -> Iterator[RunDirectory]:
    """A directory beside the wanted one, with the config in it, renamed when all went well.

    Args:
        target: where nothing is yet.
        config: of the run.

    Raises:
        ValueError: it cannot be written, or something has appeared there meanwhile.
    """
    unfinished = RunDirectory(target.with_name(f"{target.name}.unfinished-{os.getpid()}"))
    try:
        unfinished.acquire()
        unfinished.check_config(config)
        yield unfinished
        unfinished.release()
        unfinished.clear_lock()
        if target.exists():
            raise ValueError(f"to={target} has appeared meanwhile: choose another with --to")
        unfinished.path.rename(target)
    finally:
        shutil.rmtree(unfinished.path, ignore_errors=True)
