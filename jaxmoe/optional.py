# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Packages that a part of jaxmoe needs and `import jaxmoe` does not.

They are imported where they are used, through `require`, so that a missing one is reported with
the command that installs it.
"""

from __future__ import annotations

import importlib
from typing import Any

from jaxmoe.errors import JaxmoeError


class MissingPackageError(JaxmoeError, ImportError):
    """An optional package is not installed; the message says what to install."""


def require(module: str, extra: str = "train") -> Any:
    """Import an optional package.

    Args:
        module: Its import name, dotted if need be.
        extra: The extra of jaxmoe that brings it.

    Returns:
        The module.

    Raises:
        MissingPackageError: If it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            f"{module.partition('.')[0]} is not installed: pip install 'jaxmoe[{extra}]'"
        ) from error
