# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Recognises directories of Hugging Face models, and downloads models by their name on the hub."""

from __future__ import annotations

import os
import pathlib
import re

from jaxmoe.checkpoint.huggingface.export import CONFIG
from jaxmoe.checkpoint.huggingface.paths import check_plain
from jaxmoe.checkpoint.manifest import CheckpointError
from jaxmoe.json_bounds import read_json
from jaxmoe.messages import write
from jaxmoe.optional import MissingPackageError, require

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_FILES = ("*.json", "*.safetensors", "*.txt", "*.jinja")
_OTHER_COPIES = ("*/*.safetensors", "consolidated*.safetensors")
"""Weights in the layout of their authors, which some models have beside those of transformers."""


def is_huggingface(path: str | os.PathLike[str]) -> bool:
    """Return whether a directory holds a model of `transformers`: a config.json with a model_type.

    Args:
        path: Directory, such as a run directory, whose config.json has no model_type.
    """
    try:
        fields = read_json(check_plain(pathlib.Path(path) / CONFIG))
    except (OSError, ValueError):  # no file, or one that its reader reports
        return False
    return isinstance(fields, dict) and "model_type" in fields


def is_hub_name(name: str) -> bool:
    """Return whether a text may name a model on the hub: OWNER/NAME, and no place here.

    Args:
        name: Text. A path below a local directory, such as runs/mine, is a run that does not exist.
    """
    path = pathlib.Path(name)
    return bool(_NAME.fullmatch(name)) and not path.exists() and not path.parent.is_dir()


def model_directory(name: str | os.PathLike[str], field: str) -> str:
    """Return a directory as it is, and a name on the hub as the directory of its download.

    Args:
        name: Directory, or a name as `allenai/OLMoE-1B-7B-0924`.
        field: Name of the argument, for messages.

    Returns:
        The directory; a path that is neither a directory nor such a name is returned as it is.

    Raises:
        CheckpointError: The name is not a directory, and its model cannot be downloaded.
    """
    name = os.fspath(name)
    if not is_hub_name(name):
        return name
    folder = name.rpartition("/")[2]
    by_hand = (
        f"download it with `hf download {name} --local-dir {folder}` (pip install"
        f" huggingface_hub), and give {folder}"
    )
    try:
        hub = require("huggingface_hub", extra="hf")
    except MissingPackageError as error:
        raise CheckpointError(
            f"{field}={name} is not a directory. If it is a model of the Hugging Face hub,"
            f" {by_hand}"
        ) from error
    write(f"{field}={name} is not a directory: downloading it from the Hugging Face hub")
    try:
        return hub.snapshot_download(
            name, allow_patterns=list(_FILES), ignore_patterns=list(_OTHER_COPIES)
        )
    except (OSError, ValueError) as error:  # all errors of the hub and the network are OSErrors
        why = str(error).strip().partition("\n")[0] or type(error).__name__
        raise CheckpointError(
            f"{field}={name} is not a directory, and was not downloaded from the Hugging Face hub:"
            f" {why}. Check the name; on a machine with a network, {by_hand}"
        ) from error
