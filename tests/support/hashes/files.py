# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The file of hashes: JSON with the environment and the parts of every row; and its comparison."""

from __future__ import annotations

import json
import pathlib

Parts = dict[str, str]

ERROR = "error"
"""Part of a row that could not be computed; its value is the message."""


def write(path: pathlib.Path, environment: dict[str, str], rows: dict[str, Parts]) -> None:
    """Write a file of hashes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"environment": environment, "rows": dict(sorted(rows.items()))}
    path.write_text(json.dumps(content, indent=1) + "\n")


def read(path: pathlib.Path) -> tuple[dict[str, str], dict[str, Parts]]:
    """Return the environment and the rows of a file of hashes."""
    content = json.loads(path.read_text())
    return content["environment"], content["rows"]


def errors(rows: dict[str, Parts]) -> list[str]:
    """Return a line for each row that could not be computed."""
    return [f"{name}: {parts[ERROR]}" for name, parts in sorted(rows.items()) if ERROR in parts]


def environment_differences(old: dict[str, str], new: dict[str, str]) -> list[str]:
    """Return a line for each entry of the environment that differs."""
    names = sorted(old.keys() | new.keys())
    return [
        f"{name}: {old.get(name)} in OLD, {new.get(name)} in NEW"
        for name in names
        if old.get(name) != new.get(name)
    ]


def differences(old: dict[str, Parts], new: dict[str, Parts]) -> list[str]:
    """Return a line for each row that differs, with the names of its parts.

    A row that failed differs, also if it failed in both files: an error is not a hash.
    """
    lines = []
    for name in sorted(old.keys() | new.keys()):
        if name not in new or name not in old:
            lines.append(f"{name}: only in {'OLD' if name in old else 'NEW'}")
            continue
        before, after = old[name], new[name]
        if ERROR in before or ERROR in after:
            failed = [f"{file} failed ({parts[ERROR]})" for file, parts in _named(before, after)]
            lines.append(f"{name}: {', '.join(failed)}")
            continue
        changed = [
            part if part in before and part in after else f"{part} (only in {_only(part, before)})"
            for part in sorted(before.keys() | after.keys())
            if before.get(part) != after.get(part)
        ]
        if changed:
            lines.append(f"{name}: {', '.join(changed)}")
    return lines


def _named(before: Parts, after: Parts) -> list[tuple[str, Parts]]:
    return [(file, parts) for file, parts in (("OLD", before), ("NEW", after)) if ERROR in parts]


def _only(part: str, before: Parts) -> str:
    return "OLD" if part in before else "NEW"
