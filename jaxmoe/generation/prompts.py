# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Reads prompts from a file, and writes samples into one."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence
from typing import Any

from jaxmoe.generation.text import Sample
from jaxmoe.json_bounds import parse_json


def read_prompts(path: str) -> list[str]:
    """Return the prompts of a file.

    Args:
        path: File with a prompt in each line; in a .jsonl file an object with the field "prompt".

    Raises:
        ValueError: It cannot be read, has no prompt, or a line holds none.
    """
    try:
        lines = pathlib.Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"prompts={path} cannot be read: {error}") from error
    found = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        prompt: Any = line
        if path.endswith(".jsonl"):
            try:
                value = parse_json(line)
            except ValueError as error:
                raise ValueError(f"prompts={path} line {number} is not JSON: {error}") from error
            prompt = value.get("prompt") if isinstance(value, dict) else None
        if not isinstance(prompt, str) or not prompt:
            raise ValueError(
                f"prompts={path} line {number} must be an object with a text in the field"
                f" 'prompt', found {line[:40]!r}"
            )
        found.append(prompt)
    if not found:
        raise ValueError(f"prompts={path} is empty: write a prompt into each line")
    return found


def write_samples(samples: Sequence[Sample], path: str) -> None:
    """Write an object with "prompt" and "text" for each sample, one in a line.

    Args:
        samples: Prompts and their continuations.
        path: File to make.

    Raises:
        FileExistsError: It exists.
    """
    lines = [json.dumps({"prompt": one.prompt, "text": one.text}) + "\n" for one in samples]
    with pathlib.Path(path).open("x", encoding="utf-8") as file:
        file.writelines(lines)
