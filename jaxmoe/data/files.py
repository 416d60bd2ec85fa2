# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Finds the files of a path, and reads their documents.

    --data.path 'docs/**/*.{md,txt}' more.jsonl.zst shards/ gs://bucket/web-*.parquet

A path is a file, a glob (`**`, braces) or a directory, which stands for every file below it that is
data or text (its first bytes are UTF-8; hidden files are left out). Buckets are read through
`epath`, which needs packages of its own for them. Files are ordered by name.

The fingerprint holds each file's name below their common directory, its size and its sha256 (one
sha256 of all files if they are many), so that data may move, but not change.

To add a file format: `jaxmoe/data/formats.py`.
"""

from __future__ import annotations

import codecs
import dataclasses
import functools
import glob
import hashlib
import json
import logging
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal

from etils import epath

from jaxmoe.data.batch import DataError
from jaxmoe.data.formats import DATA_SUFFIXES, BadRecord, Record, index_file, read_records
from jaxmoe.data.packed import PackedSource, ReadingConfig, build_sources
from jaxmoe.data.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_MOST_NAMES = 16
"""Number of files up to which a fingerprint lists each one."""
_SNIFFED = 4096

BinDtype = Literal["uint8", "uint16", "uint32", "int32", "int64"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FileReadingConfig(ReadingConfig):
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

    def build(self, seed: int = 0) -> PackedSource:
        """Read, tokenise and plan the documents, or read them from the cache.

        Args:
            seed: Seed of the order of documents.

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


class Files:
    """Documents of files: a collection.

    Args:
        paths: Files, globs or directories.
        config: Config that says how to read them.
        field: Config field of the paths, for messages.

    Raises:
        DataError: A path matches no file.
    """

    def __init__(self, paths: Sequence[str], config: FileReadingConfig, field: str = "data.path"):
        self._config = config
        self._spelled = f"{field}={' '.join(paths)}"
        self.files = find_files(paths, field)

    def __str__(self) -> str:
        return self._spelled

    def identity(self) -> Any:
        """Return names, sizes and modification times, and the fields that affect reading."""
        return {
            "files": [[_absolute(path), *_stamp(path)] for path in self._all_files()],
            "text_field": self._config.text_field,
            "bin_dtype": self._config.bin_dtype,
        }

    def content(self) -> dict[str, Any]:
        """Return sizes and sha256, of each file if they are few."""
        return self._content

    def records(self, tokenizer: Tokenizer | None) -> Iterator[Record | BadRecord]:
        """Yield the documents of all files."""
        for path in self.files:
            yield from read_records(
                path,
                text_field=self._config.text_field,
                bin_dtype=self._config.bin_dtype,
                separator=None if tokenizer is None else tokenizer.separator,
            )

    @functools.cached_property
    def _content(self) -> dict[str, Any]:
        files = self._all_files()
        names = [_absolute(path) for path in files]
        root = os.path.commonpath([os.path.dirname(name) for name in names])
        sizes = {
            os.path.relpath(name, root): path.stat().length
            for name, path in zip(names, files, strict=True)
        }
        digests = [_sha256(path) for path in files]
        if len(files) <= _MOST_NAMES:
            pairs = zip(sizes.items(), digests, strict=True)
            return {"files": {n: f"{size} bytes, sha256 {d}" for (n, size), d in pairs}}
        listed = json.dumps([[*size, d] for size, d in zip(sizes.items(), digests, strict=True)])
        return {
            "num_files": len(files),
            "bytes": sum(sizes.values()),
            "sha256": hashlib.sha256(listed.encode()).hexdigest(),
        }

    def _all_files(self) -> list[epath.Path]:
        """Return the files and the index files of Megatron-LM."""
        indices = (index_file(path) for path in self.files if path.suffix == ".bin")
        return sorted([*self.files, *(path for path in indices if path.exists())], key=_absolute)


def find_files(paths: Sequence[str], field: str = "data.path") -> list[epath.Path]:
    """Return the files that match paths, each once, ordered by name.

    Args:
        paths: Files, globs or directories.
        field: Config field of the paths, for messages.

    Raises:
        DataError: A path matches no file.
    """
    found: dict[str, epath.Path] = {}
    for path in paths:
        try:
            files = [file for pattern in _without_braces(path) for file in _matches(pattern)]
        except (OSError, ImportError, ValueError, NotImplementedError) as error:
            raise DataError(f"{field}={path} cannot be listed: {error}") from error
        if not files:
            what = "holds no text" if epath.Path(path).exists() else "matches no file"
            raise DataError(
                f"{field}={path} {what} (from {os.getcwd()}): check it, and quote globs"
            )
        found |= {_absolute(file): file for file in map(_data_file, files)}
    return [found[name] for name in sorted(found)]


def _data_file(path: epath.Path) -> epath.Path:
    """The .bin of an .idx; any other file as it is."""
    if path.suffix != ".idx":
        return path
    data = path.with_suffix(".bin")
    if not data.exists():
        raise DataError(f"{path} has no {data.name} beside it, which holds its token ids")
    return data


def _matches(pattern: str) -> list[epath.Path]:
    """Return the files of one pattern without braces."""
    path = epath.Path(pattern).expanduser()
    if path.is_dir():
        return _text_below(path)
    if path.exists():
        return [path]
    if "://" in pattern:
        first = re.search(r"[^/]*[*?\[]", pattern)
        if first is None:
            return []
        root, rest = pattern[: first.start()], pattern[first.start() :]
        return [match for match in epath.Path(root).glob(rest) if not match.is_dir()]
    names = glob.glob(str(path), recursive=True)
    return [epath.Path(name) for name in names if not os.path.isdir(name)]


def _text_below(directory: epath.Path) -> list[epath.Path]:
    """Return the files of a directory that are data, or begin with text."""
    files = list(_walk(directory))
    kept, left_out = [], []
    for path in files:
        is_data = path.name.lower().endswith(DATA_SUFFIXES) or _is_text(path)
        (kept if is_data else left_out).append(path)
    if left_out:
        logger.warning(
            "%s: %d of %d files are left out because they are not text, %s among them",
            directory,
            len(left_out),
            len(files),
            left_out[0],
        )
    return kept


def _walk(directory: epath.Path) -> Iterator[epath.Path]:
    """Yield every file below a directory that is not hidden; buckets have no recursive glob."""
    for path in directory.iterdir():
        if path.is_dir() and not path.name.startswith("."):
            yield from _walk(path)
        elif not path.name.startswith("."):
            yield path


def _is_text(path: epath.Path) -> bool:
    with path.open("rb") as stream:
        start = stream.read(_SNIFFED)
    try:
        codecs.getincrementaldecoder("utf-8")().decode(start)
    except UnicodeDecodeError:
        return False
    return bool(start) and b"\0" not in start


def _without_braces(pattern: str) -> Iterator[str]:
    """Yield every alternative of `{a,b}`, as in a shell."""
    group = re.search(r"\{([^{}]*)\}", pattern)
    if group is None:
        yield pattern
        return
    for choice in group[1].split(","):
        yield from _without_braces(pattern[: group.start()] + choice + pattern[group.end() :])


def _absolute(path: epath.Path) -> str:
    """Return a path that has a common directory with every other path."""
    return f"/{path}" if "://" in str(path) else os.path.abspath(path)


def _stamp(path: epath.Path) -> tuple[int, int]:
    """Return size and modification time, for a local file in nanoseconds."""
    try:
        if "://" in str(path):
            remote = path.stat()
            return remote.length, remote.mtime
        local = os.stat(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    return local.st_size, local.st_mtime_ns


def _sha256(path: epath.Path) -> str:
    try:
        with path.open("rb") as stream:
            digest = hashlib.sha256()
            while chunk := stream.read(2**20):
                digest.update(chunk)
            return digest.hexdigest()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
