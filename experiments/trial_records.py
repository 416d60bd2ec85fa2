# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`trials.jsonl`: one JSON object per finished trial, so that the same command continues."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Callable, Hashable
from typing import Any

Record = dict[str, Any]


class TrialRecords:
    """The newest record of each trial in a file; every new one is on disk at once.

    Args:
        path: of the file, which need not exist.
        key: what tells the trials apart.
        data: a digest of what they are trained on.

    Raises:
        ValueError: the file holds trials on other data.
    """

    def __init__(self, path: pathlib.Path, key: Callable[[Record], Hashable], data: str):
        self._path, self._key, self._data = path, key, data
        self._records: dict[Hashable, Record] = {}
        if not path.exists():
            return
        lines = path.read_text(encoding="utf-8").split("\n")
        if lines.pop():  # a line that was cut in half
            path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        for record in map(json.loads, lines):
            if record["data"] != data:
                raise ValueError(
                    f"{path} holds trials on other data (another Python has another library, whose"
                    " source is the corpus): choose another directory with --run.directory"
                )
            self._records[key(record)] = record

    def get(self, key: Hashable) -> Record | None:
        """The record of a trial, if there is one."""
        return self._records.get(key)

    def add(self, record: Record) -> None:
        """A new one, which replaces an older one of the same trial."""
        record = {**record, "data": self._data}
        self._records[self._key(record)] = record
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
