# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Unions of configs as registries."""

from __future__ import annotations

import typing
from typing import Any


def registry_of(union: Any) -> dict[str, type]:
    """The members of a union of config classes, by the `name` that each class carries.

    Args:
        union: `A | B | ...`, or a single config class.

    Returns:
        `{name: class}`, in the order of the union.
    """
    members = typing.get_args(union) or (union,)
    return {member.name: member for member in members}
