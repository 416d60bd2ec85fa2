# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Keeps a copy of the tokenizer in the run directory, so that text needs no other file.

The digest of its tokenizer.json is kept beside it: with ids of another tokenizer a model reads and
writes other text, and no error would say so.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
import shutil
from typing import Any

from jaxmoe.checkpoint.huggingface.tokenizer import TOKENIZER, tokenizer_texts
from jaxmoe.data import Source, SourceKind
from jaxmoe.data.tokenizer import SubwordTokenizer
from jaxmoe.disk import replace_file
from jaxmoe.json_bounds import read_record
from jaxmoe.run.config import PretrainConfig
from jaxmoe.run.directory import RunDirectory

DIGESTS = "sha256.json"
"""File with the digest of the copy of tokenizer.json."""


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
    digest = hashlib.sha256(texts[TOKENIZER].encode()).hexdigest()
    with directory.usable():
        replace_file(place / DIGESTS, json.dumps({TOKENIZER: digest}))
        for name in sorted(texts, key=lambda name: name == TOKENIZER):  # last: then all are there
            replace_file(place / name, texts[name])


def own_data(config: PretrainConfig, directory: RunDirectory) -> SourceKind:
    """Return the data config of a run with its own copy of the tokenizer, if there is one.

    Args:
        config: Configuration of the run.
        directory: Run directory, which may have been moved.

    Raises:
        ValueError: The copy is not the file that the run kept.
    """
    path = directory.tokenizer_directory / TOKENIZER
    data: Any = config.data
    if not path.is_file():
        return data
    _check(path)
    return data.with_tokenizer(path)


def _check(path: pathlib.Path) -> None:
    """Compare a copy with the digest beside it; runs of earlier versions have none."""
    digests = path.parent / DIGESTS
    if not digests.is_file():
        return
    wanted = read_record(digests, dict).get(TOKENIZER)
    if wanted != hashlib.sha256(path.read_bytes()).hexdigest():
        raise ValueError(
            f"{path} is not the file that the run kept (its digest is not that of {digests.name}):"
            " the model was trained on the ids of another one; restore it"
        )


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
