# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""A run directory that a conversion makes: it appears whole or not at all."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
from collections.abc import Iterator

from experiments.config import PretrainConfig
from experiments.run_directory import RunDirectory


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
