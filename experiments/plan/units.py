# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Formats numbers of a plan."""

from __future__ import annotations


def size_in_words(number: float) -> str:
    """Return bytes with a fitting unit."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(number) >= size:
            return f"{number / size:.2f} {unit}"
    return f"{number:.0f} B"
