# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Refuses object stores in flags that name a run, checkpoint or output, before anything is written.

Only `data` reads from object stores (`--data.path gs://bucket/*.parquet`).
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Iterator
from typing import Any

from jaxmoe.disk import check_local

_STORE = re.compile(r"(gs|s3|az|abfss?|adl|hf|r2|oss)://")
_READS = "data"
"""Section whose paths may be in object stores."""


def check_local_paths(config: Any) -> None:
    """Refuse a config with a path in an object store outside of its data.

    Args:
        config: Config of a command.

    Raises:
        ValueError: Names the field, and how to copy a run to a bucket.
    """
    for field, text in _texts(config):
        for name, word in _words(field, text):
            if _STORE.match(word):
                check_local(name, word)


def _texts(config: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield dotted path and text of every field that holds one, outside of the data."""
    for field in dataclasses.fields(config):
        path, value = f"{prefix}{field.name}", getattr(config, field.name)
        if path == _READS:
            continue
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, str):
                yield path, item
            elif dataclasses.is_dataclass(item):
                yield from _texts(item, f"{path}.")


def _words(field: str, text: str) -> Iterator[tuple[str, str]]:
    """Yield name and value; of a command line, those of each of its flags."""
    if field != "command":
        yield field, text
        return
    flag = ""
    for word in shlex.split(text):
        name, equals, value = word.partition("=")
        if word.startswith("--"):
            flag = name.removeprefix("--")
            word = value if equals else ""
        if not flag.startswith(f"{_READS}."):
            yield flag or field, word
