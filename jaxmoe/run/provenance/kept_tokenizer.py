# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Keeps a copy of the tokenizer in the run directory, so that text needs no other file."""

from __future__ import annotations

import shutil
from typing import Any

from jaxmoe.checkpoint.huggingface.tokenizer import TOKENIZER, tokenizer_texts
from jaxmoe.data import DataConfig, Source
from jaxmoe.data.tokenizer import SubwordTokenizer
from jaxmoe.disk import replace_file
from jaxmoe.run.config import PretrainConfig
from jaxmoe.run.directory import RunDirectory


def keep_tokenizer(directory: RunDirectory, config: PretrainConfig, source: Source) -> None:
    """Copy the tokenizer.json of a run's data and its companions, unless there is a copy.

    Args:
        directory: Run directory, held by this process.
        config: Configuration of the run.
        source: Data of the run.

    Raises:
        ValueError: The directory cannot be written.
    """
    tokenizer, kind = getattr(source, "tokenizer", None), config.data.tokenizer
    place = directory.tokenizer_directory
    if not isinstance(tokenizer, SubwordTokenizer) or (place / TOKENIZER).exists():
        return
    texts = tokenizer_texts(tokenizer, is_trained=kind is not None and kind.is_trained)
    with directory.usable():
        for name in sorted(texts, key=lambda name: name == TOKENIZER):  # last: then all are there
            replace_file(place / name, texts[name])


def own_data(config: PretrainConfig, directory: RunDirectory) -> DataConfig:
    """Return the data config of a run with its own copy of the tokenizer, if there is one.

    Args:
        config: Configuration of the run.
        directory: Run directory, which may have been moved.
    """
    path = directory.tokenizer_directory / TOKENIZER
    data: Any = config.data
    return data.with_tokenizer(path) if path.is_file() else data


def copy_tokenizer(source: RunDirectory, target: RunDirectory) -> None:
    """Copy the tokenizer that a run keeps to another run directory.

    Args:
        source: Run directory with or without a tokenizer.
        target: Run directory without one.

    Raises:
        ValueError: A directory cannot be read or written.
    """
    if source.tokenizer_directory.is_dir():
        with target.usable():
            shutil.copytree(source.tokenizer_directory, target.tokenizer_directory)
