# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The table of rows: names, and functions that return the hashes of the parts of a row."""

from __future__ import annotations

import functools
import importlib
import pathlib
from collections.abc import Callable

Row = Callable[[pathlib.Path], dict[str, str]]
"""Computes a row, given an empty directory."""

AREAS = ("layers", "executions", "runs", "served", "data", "converted", "planned")
"""Files of this folder; each has `rows()`, which yields names and functions."""


@functools.cache
def table() -> dict[str, Row]:
    """Return the rows by name."""
    rows: dict[str, Row] = {}
    for area in AREAS:
        for name, row in importlib.import_module(f"{__name__}.{area}").rows():
            if name in rows:
                raise ValueError(f"two rows have the name {name}")
            rows[name] = row
    return rows
