# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Reads traces of requests: BurstGPT csv, Azure csv, Mooncake jsonl.

BurstGPT   Timestamp, [Session ID, Elapsed time,] Model, Request tokens, Response tokens, ...
           (seconds; rows with 0 response tokens are failed requests, which are left out)
Azure      TIMESTAMP, ContextTokens, GeneratedTokens    (date and time)
Mooncake   {"timestamp": milliseconds, "input_length", "output_length", "hash_ids": [...]}
           (one hash for each block of 512 tokens)
"""

from __future__ import annotations

import csv
import dataclasses
import datetime
import json
import pathlib
from collections.abc import Iterator

MOONCAKE_BLOCK = 512


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Traced:
    """One request of a trace."""

    time: float
    """Seconds from any origin."""
    prompt: int
    """Tokens of the prompt."""
    answer: int
    """Tokens of the answer."""
    session: str = ""
    """Conversation, where the trace tells."""
    hashes: tuple[int, ...] = ()
    """Names of the blocks of the prompt."""
    block: int = MOONCAKE_BLOCK
    """Tokens of a block."""


def read_trace(path: str) -> list[Traced]:
    """Return the requests of a file that have an answer, in the order of time.

    Args:
        path: A .jsonl file of Mooncake, or a .csv file of BurstGPT or Azure.

    Raises:
        ValueError: The file has none of these forms.
    """
    file = pathlib.Path(path)
    if not file.is_file():
        raise ValueError(f"path={path} is not a file: give a trace in csv or jsonl")
    with file.open(encoding="utf-8-sig", newline="") as lines:
        try:
            rows = list(_mooncake(lines) if file.suffix == ".jsonl" else _csv(lines, path))
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"path={path} is not a trace of a known form: {error!r}") from error
    return sorted((row for row in rows if row.answer > 0), key=lambda row: row.time)


def _mooncake(lines: Iterator[str]) -> Iterator[Traced]:
    for line in lines:
        if line.strip():
            row = json.loads(line)
            yield Traced(
                time=row["timestamp"] / 1000.0,
                prompt=int(row["input_length"]),
                answer=int(row["output_length"]),
                hashes=tuple(row.get("hash_ids", ())),
            )


def _csv(lines: Iterator[str], path: str) -> Iterator[Traced]:
    rows = csv.DictReader(lines)
    columns = set(rows.fieldnames or ())
    if {"Timestamp", "Request tokens", "Response tokens"} <= columns:
        for row in rows:
            yield Traced(
                time=float(row["Timestamp"]),
                prompt=int(row["Request tokens"]),
                answer=int(row["Response tokens"]),
                session=row.get("Session ID") or "",
            )
    elif {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} <= columns:
        for row in rows:
            # Seven digits after the second, of which Python reads six.
            moment = datetime.datetime.fromisoformat(row["TIMESTAMP"][:26])
            yield Traced(
                time=moment.replace(tzinfo=datetime.UTC).timestamp(),
                prompt=int(row["ContextTokens"]),
                answer=int(row["GeneratedTokens"]),
            )
    else:
        raise ValueError(
            f"path={path} has the columns {sorted(columns)}: expected those of BurstGPT (Timestamp,"
            " Request tokens, Response tokens) or Azure (TIMESTAMP, ContextTokens, GeneratedTokens)"
        )
