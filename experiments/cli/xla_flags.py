# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Finds flags in XLA_FLAGS that XLA does not know, before XLA ends the process over them."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import mmap
import os
import pathlib

_LIBRARY = "libjax_common.so"
"""File of jaxlib that holds XLA, and with it the names of all flags as text."""


def check_xla_flags() -> None:
    """Refuse an unknown flag in XLA_FLAGS; XLA aborts at one, when it first finds its devices.

    A known flag costs milliseconds. A name that is part of another text of the library passes, and
    a library that is not found passes every flag.

    Raises:
        ValueError: A flag is unknown.
    """
    words = os.environ.get("XLA_FLAGS", "").split()
    if not words or not words[0].startswith("--"):
        return  # none, or the name of a file with flags
    package = importlib.util.find_spec("jaxlib")
    library = pathlib.Path((package and package.origin) or "").parent / _LIBRARY
    if not library.is_file():
        return
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        for word in words:
            name = word.partition("=")[0].removeprefix("--")
            if word.startswith("--") and text.find(name.encode()) < 0:
                version = importlib.metadata.version("jaxlib")
                raise ValueError(
                    f"XLA_FLAGS has --{name}, which the XLA of jaxlib {version} does not know:"
                    " remove it (flags of the TPU compiler go to LIBTPU_INIT_ARGS)"
                )
