# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Changes fields of a config by their dotted paths, all at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxmoe.configs import config_classes, field_types


def changed(config: Any, fields: Mapping[str, Any]) -> Any:
    """Return a config with other values at some dotted paths.

    Args:
        config: A config.
        fields: Values by path; one may be below another, or below a field that is None and has one
            class.
    """
    values: dict[str, Any] = {}
    below: dict[str, dict[str, Any]] = {}
    for path, value in fields.items():
        name, _, rest = path.partition(".")
        if rest:
            below.setdefault(name, {})[rest] = value
        else:
            values[name] = value
    for name, inner in below.items():
        value = values.get(name, getattr(config, name))
        if value is None:
            (member,) = config_classes(field_types(type(config))[name]).values()
            value = member()
        values[name] = changed(value, inner)
    return dataclasses.replace(config, **values)
