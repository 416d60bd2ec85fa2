# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Checks the directory of all steps before it is opened, and the files of one step."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jax

from jaxmoe.checkpoint import bounds, checksums
from jaxmoe.checkpoint.manifest import CheckpointDamagedError, CheckpointError, read_manifest
from sharding.distributed import agree

Verify = Literal["full", "files", "off"]
"""Checks of a restore: file checksums and array fingerprints, file checksums only, or none."""


def check_directory(directory: Any, shelves: Sequence[str], *, is_writer: bool) -> None:
    """Raise unless a directory of steps can be opened.

    Args:
        directory: Directory of all steps.
        shelves: Names of directories below it, to which a writer moves steps.
        is_writer: Whether steps will be written; if so, the directory may be missing.

    Raises:
        CheckpointError: The directory is missing, or a name that it needs is not a directory.
        CheckpointDamagedError: A step must not be listed.
    """
    place = pathlib.Path(directory)
    if not is_writer and not place.exists():
        raise CheckpointError(f"{place} holds no checkpoints: the directory does not exist")
    inner = [place / name for name in shelves] if is_writer else []
    for path in (place, *inner):
        if os.path.lexists(path) and not path.is_dir():
            raise CheckpointError(
                f"{path} is not a directory, and checkpoints need one of that name: move it away"
            )
    if lines := bounds.before_opening(place):
        raise CheckpointDamagedError(f"{place} is damaged: {'; '.join(lines[:5])}")


def make_directory(directory: Any) -> None:
    """Make a directory on the first process; every process must call this.

    Raises:
        OSError: It cannot be made; raised on all processes.
    """
    error = None
    if jax.process_index() == 0:
        try:
            pathlib.Path(directory).mkdir(parents=True, exist_ok=True)
        except OSError as refused:
            error = refused
    if agree(error is not None):
        raise error or OSError("the first process cannot make it")


@contextlib.contextmanager
def opening_errors(directory: Any) -> Iterator[None]:
    """Turn errors of the operating system into a CheckpointError that names the directory."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{directory} cannot be opened ({error.strerror or error}): change its name or its"
            " permissions, or choose another directory"
        ) from error


def damage_of_step(step: pathlib.Path, verify: Verify) -> list[str]:
    """Return one line for each damaged or missing file of a step.

    Args:
        step: Directory of the step.
        verify: Checks of a restore; without "off", checksums are compared.
    """
    try:
        return _damage(step, verify)
    except OSError as error:  # such as a bad sector
        return [f"{error.filename or step.name}: cannot be read ({error.strerror or error})"]


def _damage(step: pathlib.Path, verify: Verify) -> list[str]:
    has_list = (step / checksums.LIST).exists()
    lines = bounds.places(step) or bounds.texts(step, (checksums.LIST,))
    if has_list:
        lines = lines or _find_uncommitted(step)
        if verify != "off":
            lines = lines or checksums.damage(step)
    lines = lines or bounds.texts(step)
    if not has_list and verify != "off":
        lines = lines or checksums.damage(step)
    return lines or bounds.contents(step) or _check_exchanged(step)


def _find_uncommitted(step: pathlib.Path) -> list[str]:
    """Return one line for each file of the commit that a step lacks.

    A step of `streaming.py` has these files in each of its items, and in its list of files.
    """
    if (step / "state" / checksums.OF_THE_COMMIT[1]).exists():
        return []
    missing = [name for name in checksums.OF_THE_COMMIT if not (step / name).is_file()]
    return [f"{name}: missing, the step was not committed" for name in missing]


def _check_exchanged(step: pathlib.Path) -> list[str]:
    """Return a line for a step that lies in the directory of another one."""
    try:
        manifest = read_manifest(step)
    except CheckpointError:
        return []  # said where the manifest is read
    if str(manifest.step) == step.name:
        return []
    number = f"of step {manifest.step}, in the directory of step {step.name}"
    return [f"manifest: {number}: renamed or exchanged"]
