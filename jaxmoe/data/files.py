# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Reads the documents of files.

    --data.path 'docs/**/*.{md,txt}' more.jsonl.zst shards/ gs://bucket/web-*.parquet

A path is a file, a glob (`**`, braces) or a directory (`reading/paths.py`). Buckets are read
through `epath`, which needs packages of its own for them. Files are ordered by name.

The fingerprint holds each file's name below their common directory, its size and its sha256 (one
sha256 of all files if they are many), so that data may move, but not change.

To add a file format: `jaxmoe/data/reading/formats.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal

from etils import epath

from jaxmoe.data.batch import DataError
from jaxmoe.data.packed import PackedSource, build_sources
from jaxmoe.data.reading.config import TextReadingConfig
from jaxmoe.data.reading.formats import read_records
from jaxmoe.data.reading.paths import FileEntry, find_files
from jaxmoe.data.reading.records import BadRecord, Record
from jaxmoe.data.tokenizer import Tokenizer

_MOST_NAMES = 16
"""Number of files up to which a fingerprint lists each one."""

BinDtype = Literal["uint8", "uint16", "uint32", "int32", "int64"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FileReadingConfig(TextReadingConfig):
    """Fields of all sources that read files."""

    bin_dtype: BinDtype = "uint16"
    """Integer type of .bin files of token ids without an .idx file."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FilesConfig(FileReadingConfig):
    """Text, JSON lines, Parquet or token ids from files of your own."""

    name: ClassVar[str] = "files"

    path: tuple[str, ...] = ()
    """Files, globs or directories, separated by spaces; local, gs:// or s3://."""
    validation_path: tuple[str, ...] = ()
    """Files to hold out; a fraction of the documents of `path` when empty."""

    def for_evaluation(self) -> FilesConfig:
        """Return the config that holds out all files, unless it names held-out files."""
        return dataclasses.replace(self, validation_path=self.validation_path or self.path)

    def build(self, seed: int = 0) -> PackedSource:
        """Read, tokenise and plan the documents, or read them from the cache.

        Raises:
            DataError: A path, a file or a record cannot be used.
        """
        if not self.path:
            raise DataError("data.path is empty: give files, globs or directories after it")
        held_out = None
        if self.validation_path:
            held_out = Files(self.validation_path, self, "data.validation_path")
        train = Files(self.path, self)
        return build_sources(self, self.name, {"": train}, held_out=held_out, seed=seed)[""]


class FileCollection:
    """Files of a collection, and what identifies them.

    Args:
        paths: Files, globs or directories.
        field: Config field of the paths, for messages.

    Raises:
        DataError: A path matches no file.
    """

    def __init__(self, paths: Sequence[str], field: str):
        self._spelled = f"{field}={' '.join(paths)}"
        self._found = find_files(paths, field)
        self._without_checksum: set[str] = set()
        self._records: dict[str, set[str]] = {}

    def __str__(self) -> str:
        return self._spelled

    @functools.cached_property
    def stamps(self) -> list[Any]:
        """Name, size and modification time of each file that was found."""
        return self._found.stamps()

    @functools.cached_property
    def files(self) -> list[epath.Path]:
        """Files to read: data and text.

        Raises:
            DataError: A file cannot be read, or a directory holds no text.
        """
        return [epath.Path(entry.path) for entry in self._text[0]]

    @functools.cached_property
    def _text(self) -> tuple[list[FileEntry], list[str]]:
        """Files to read, and warnings of those that are left out."""
        return self._found.text_files()

    def warnings_of_files(self) -> list[str]:
        """Return warnings of files that are left out, of content without a checksum, and of records
        that were read as text."""
        lines = self._text[1] + [
            f"{self}: {len(names)} of {len(self.files)} files are {kind}, {min(names)} among them,"
            " and each is trained as one text, with its quotes, braces and names of fields. To"
            " train on a field of it, name it .json, and the field with --data.text_field"
            for kind, names in sorted(self._records.items())
        ]
        if not self._without_checksum:
            return lines
        return [
            *lines,
            f"{self}: {len(self._without_checksum)} of {len(self.files)} files have zstd frames "
            f"without a checksum, {min(self._without_checksum)} among them, so that damaged "
            "content may be read as text: compress them with `zstd --check` to have it detected",
        ]

    def holds_records(self, path: epath.Path, kind: str) -> None:
        """Remember that a file that is read as one text holds records, such as "JSON"."""
        self._records.setdefault(kind, set()).add(str(path))

    def without_checksum(self, path: epath.Path) -> None:
        """Remember that compressed content of a file has no checksum."""
        self._without_checksum.add(str(path))

    @functools.cached_property
    def content_of_files(self) -> dict[str, Any]:
        """Sizes and sha256, of each file if they are few."""
        found = self._text[0]
        files = [*found, *(file.index for file in found if file.index is not None)]
        files.sort(key=lambda file: file.name)
        root = os.path.commonpath([os.path.dirname(file.name) for file in files])
        sizes = {}
        digests = []
        for file in files:
            name = os.path.relpath(file.name, root)
            sizes[name], digest = _size_and_sha256(epath.Path(file.path))
            digests.append(digest)
        if len(files) <= _MOST_NAMES:
            pairs = zip(sizes.items(), digests, strict=True)
            return {"files": {n: f"{size} bytes, sha256 {d}" for (n, size), d in pairs}}
        listed = json.dumps([[*size, d] for size, d in zip(sizes.items(), digests, strict=True)])
        return {
            "num_files": len(files),
            "bytes": sum(sizes.values()),
            "sha256": hashlib.sha256(listed.encode()).hexdigest(),
        }


class Files(FileCollection):
    """Documents of files: a collection.

    Args:
        paths: Files, globs or directories.
        config: Config that says how to read them.
        field: Config field of the paths, for messages.

    Raises:
        DataError: A path matches no file.
    """

    has_weights = False

    def __init__(self, paths: Sequence[str], config: FileReadingConfig, field: str = "data.path"):
        super().__init__(paths, field)
        self._config = config

    def identity(self) -> Any:
        """Return names, sizes and modification times, and the fields that affect reading."""
        return {
            "files": self.stamps,
            "text_field": self._config.text_field,
            "bin_dtype": self._config.bin_dtype,
        }

    def content(self) -> dict[str, Any]:
        """Return sizes and sha256, of each file if they are few."""
        return self.content_of_files

    def warnings(self) -> list[str]:
        """Return what `records` found that does not stop it."""
        return self.warnings_of_files()

    def records(self, tokenizer: Tokenizer | None) -> Iterator[Record | BadRecord]:
        """Yield the documents of all files."""
        for path in self.files:
            yield from read_records(
                path,
                text_field=self._config.text_field,
                bin_dtype=self._config.bin_dtype,
                separator=None if tokenizer is None else tokenizer.separator,
                on_no_checksum=functools.partial(self.without_checksum, path),
                on_records=functools.partial(self.holds_records, path),
            )


def _size_and_sha256(path: epath.Path) -> tuple[int, str]:
    try:
        with path.open("rb") as stream:
            digest = hashlib.sha256()
            size = 0
            while chunk := stream.read(2**20):
                digest.update(chunk)
                size += len(chunk)
            return size, digest.hexdigest()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
