# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Reads prompts from a file, and writes samples into one."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence

from jaxmoe.generation.text import Sample
from jaxmoe.json_bounds import parse_json


def read_prompts(path: str) -> list[str]:
    """Return the prompts of a file.

    Args:
        path: File with a prompt in each line; in a .jsonl file an object with the field "prompt".

    Raises:
        ValueError: It cannot be read, has no prompt, or a line holds none.
    """
    if path.endswith(".jsonl"):
        return [record["prompt"] for record in read_records(path, "prompts")]
    return [line for _, line in _lines(path, "prompts")]


def read_records(
    path: str, field: str, fields: Sequence[str] = (), *, optional: Sequence[str] = ()
) -> list[dict[str, str]]:
    """Return the texts of a file of JSON lines.

    Args:
        path: File with an object in each line.
        field: Name of the path in messages.
        fields: Fields that a line has beside "prompt".
        optional: Fields that are texts where a line has them.

    Returns:
        Prompt, not empty, and other fields of each line; fields that are not asked for are texts
        or left out.

    Raises:
        ValueError: It cannot be read, has no line, or a line lacks a field or has no text in it.
    """
    records = []
    for number, line in _lines(path, field):
        try:
            value = parse_json(line)
        except ValueError as error:
            raise ValueError(f"{field}={path} line {number} is not JSON: {error}") from error
        record = value if isinstance(value, dict) else {}
        for name in ("prompt", *fields, *(name for name in optional if name in record)):
            text = record.get(name)
            if not isinstance(text, str) or (name == "prompt" and not text):
                raise ValueError(
                    f"{field}={path} line {number} must be an object with a text in the field"
                    f" '{name}', found {line[:40]!r}"
                )
        records.append({name: text for name, text in record.items() if isinstance(text, str)})
    return records


def _lines(path: str, field: str) -> list[tuple[int, str]]:
    """Return the lines of a file that are not blank, with their numbers from 1."""
    try:
        # Read so, lines end at line feeds and carriage returns alone, as in JSON Lines.
        lines = pathlib.Path(path).read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{field}={path} cannot be read: {error}") from error
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise ValueError(f"{field}={path} is empty: write a prompt into each line")
    return numbered


def write_samples(samples: Sequence[Sample], path: str) -> None:
    """Write an object with "prompt" and "text" for each sample, one in a line.

    Args:
        samples: Prompts and their continuations.
        path: File to make; a first `~` is the home directory.

    Raises:
        OSError: It exists, or cannot be written.
    """
    lines = [
        json.dumps({"prompt": sample.prompt, "text": sample.text}) + "\n" for sample in samples
    ]
    with pathlib.Path(path).expanduser().open("x", encoding="utf-8") as file:
        file.writelines(lines)
