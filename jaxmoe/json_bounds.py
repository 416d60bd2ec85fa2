# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Parses JSON of untrusted files with bounds on bytes, depth and number of values.

`json.loads` alone raises RecursionError for deep JSON, and code that walks the result may as well.
"""

from __future__ import annotations

import json
import pathlib
import re
from typing import Any

MAX_JSON_BYTES = 1 << 24
MAX_JSON_VALUES = 1 << 19
"""Largest number of objects and lists in one file."""
MAX_JSON_DEPTH = 64

# Possessive: linear in the length of the text, also for strings that do not end.
_TOKENS = re.compile(r'"(?:[^"\\]++|\\.)*+"?|[\[{]|[\]}]', re.DOTALL)


def read_json(
    path: pathlib.Path, *, max_bytes: int = MAX_JSON_BYTES, max_values: int = MAX_JSON_VALUES
) -> Any:
    """Return the content of a JSON file.

    Args:
        path: Plain file, in UTF-8.
        max_bytes: Largest size of the file.
        max_values: Largest number of objects and lists.

    Raises:
        ValueError: The file is too large or too deep, or not JSON.
    """
    size = path.stat().st_size
    if size > max_bytes:
        raise ValueError(f"{size} bytes, at most {max_bytes} are allowed")
    return parse_json(path.read_text(encoding="utf-8"), max_values=max_values)


def parse_json(text: str, *, max_values: int = MAX_JSON_VALUES) -> Any:
    """Return the value of a JSON text.

    Args:
        text: JSON.
        max_values: Largest number of objects and lists.

    Raises:
        ValueError: The text is too deep, has too many values, or is not JSON (JSONDecodeError).
    """
    depth = values = 0
    for match in _TOKENS.finditer(text):
        if match[0] in "[{":
            values, depth = values + 1, depth + 1
            if depth > MAX_JSON_DEPTH or values > max_values:
                raise ValueError(
                    f"more than {max_values} objects and lists, or nested deeper than"
                    f" {MAX_JSON_DEPTH}"
                )
        elif match[0] in "]}":
            depth -= 1
    return json.loads(text)
