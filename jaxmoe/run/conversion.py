# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Creates run directories for converted models, whole or not at all, and reads their limits."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any, Literal

from jaxmoe.checkpoint.huggingface import read_fields
from jaxmoe.checkpoint.huggingface.hub import is_huggingface
from jaxmoe.checkpoint.huggingface.tokenizer import eos_ids, read_generation
from jaxmoe.data import Source
from jaxmoe.generation.text import separator_of
from jaxmoe.run.config import PretrainConfig
from jaxmoe.run.directory import RunDirectory

Ends = Literal["auto", "stop", "ignore"]
"""Whether the end-of-text token ends a text; auto: only for models that were imported."""


def length_of(directory: RunDirectory, config: PretrainConfig) -> int:
    """Return the longest sequence of a run: of an imported model, or a training row.

    Args:
        directory: Run directory, or directory of a Hugging Face model.
        config: Configuration of the run.
    """
    if is_huggingface(directory.path):
        length = read_fields(directory.path).get("max_position_embeddings")
    else:
        length = _imported(directory, "max_length")
    return length or config.training.sequence_length


def first_token_of(directory: RunDirectory) -> int | None:
    """Return the id that begins a text; None unless an imported model has one.

    Args:
        directory: Run directory.
    """
    return _imported(directory, "bos_token_id")


def imported_ends(directory: RunDirectory) -> tuple[int, ...]:
    """Return the ids that end a text of an imported model; none of other runs.

    Args:
        directory: Run directory.
    """
    found = eos_ids(*imported_generation(directory))
    return found if all(isinstance(one, int) for one in found) else ()


def imported_generation(directory: RunDirectory) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return special token ids and generation_config.json of an imported model; empty of others.

    Args:
        directory: Run directory.
    """
    summary = directory.summary() or {}
    found = [summary.get(name) for name in ("special_tokens", "generation")]
    special, generation = (one if isinstance(one, dict) else {} for one in found)
    return special, generation


def end_ids(
    directory: RunDirectory, config: PretrainConfig, source: Source, eos: Ends
) -> tuple[int, ...]:
    """Return the ids that end a text.

    Args:
        directory: Run directory, or directory of a Hugging Face model.
        config: Configuration of the run.
        source: Its data.
        eos: Whether the end-of-text token ends a text.

    Raises:
        ValueError: eos="stop", and the data has no end-of-text token.
    """
    is_imported = is_huggingface(directory.path)
    if eos == "ignore" or (eos == "auto" and not (is_imported or not config.data.has_rows)):
        return ()
    if is_imported:
        return eos_ids(read_fields(directory.path), read_generation(directory.path))
    if found := imported_ends(directory):
        return found
    separator = separator_of(source)
    if separator is None and eos == "stop":
        raise ValueError(
            "eos=stop: the data of this run has no token that ends a text: leave it out"
        )
    return () if separator is None else (separator,)


def _imported(directory: RunDirectory, field: str) -> int | None:
    value = (directory.summary() or {}).get(field)
    return value if isinstance(value, int) else None


@contextlib.contextmanager
def new_run(target: pathlib.Path, config: PretrainConfig) -> Iterator[RunDirectory]:
    """Create a run directory with its config, renamed into place if nothing was raised.

    Args:
        target: Path of the run directory; must not exist.
        config: Configuration of the run.

    Raises:
        ValueError: The directory cannot be written, or the target appeared meanwhile.
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
