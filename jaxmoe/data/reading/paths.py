# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Finds the files that paths, globs and directories stand for.

A directory stands for every file below it that is data or text (its first bytes are UTF-8); hidden
files are left out. Symbolic links are followed, and one that leads back to a directory above it is
refused. Files must be regular: a FIFO, a socket or a device cannot be read twice, and may block.

A directory is listed once, with one `stat` for each file, and no file is opened: names, sizes and
times of modification identify the files. Which of them are text is found out when they are read
(`FileList.text_files`), so that a start that reads the cache stays cheap with many files.

To read from another kind of bucket: register its prefix with `epath.register_path_cls`.
"""

from __future__ import annotations

import codecs
import dataclasses
import errno
import glob
import logging
import os
import re
import stat
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from etils import epath

from jaxmoe.data.batch import DataError
from jaxmoe.data.reading.formats import DATA_SUFFIXES, index_file
from jaxmoe.disk import kind_of_mode

logger = logging.getLogger(__name__)

_SNIFFED = 4096
_RECURSIVE = re.compile(r"(?P<root>(?:.*?/)?)\*\*(?:/|$)")
"""A glob that descends into directories of any depth; `root` is what precedes the first `**`."""


class FileEntry(NamedTuple):
    """A file, as it was when it was found."""

    path: str
    """Path to open, and to show."""
    name: str
    """Path that has a common directory with those of all other files."""
    size: int
    """Bytes."""
    mtime: int
    """Time of modification; of a local file in nanoseconds."""
    may_be_binary: bool = False
    """Whether its first bytes decide if it is read."""
    index: FileEntry | None = None
    """File of the borders of a .bin file."""


class _MatchedPath(NamedTuple):
    """A path that a pattern matches."""

    path: str
    name: str | None = None
    """`FileEntry.name`, if it is known."""
    status: os.stat_result | None = None
    """Status of the file, if it is known."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Directory:
    """Files of a directory whose first bytes decide if they are read."""

    path: str
    count: int
    """Number of all its files."""
    unknown: list[_MatchedPath]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _PathMatches:
    """What one path of the user stands for."""

    spelled: str
    """Field and path."""
    matches: list[_MatchedPath]
    """Files that are read."""
    directories: list[_Directory]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FileList:
    """Files that paths stand for."""

    files: list[FileEntry]
    """Each file once, ordered by name; those that may be binary among them."""
    path_matches: list[_PathMatches]
    """What each path stands for."""

    def stamps(self) -> list[list[str | int]]:
        """Return name, size and time of modification of each file, and of its index, by name.

        A file that may be binary has a mark, and its directory follows the files.
        """
        files = [*self.files, *(file.index for file in self.files if file.index is not None)]
        files.sort(key=lambda file: file.name)
        rows: list[list[str | int]] = []
        for _, name, size, mtime, may_be_binary, _ in files:
            rows.append([name, size, mtime, "?"] if may_be_binary else [name, size, mtime])
        directories = [d for each in self.path_matches for d in each.directories if d.unknown]
        return rows + [[absolute_name(epath.Path(each.path))] for each in directories]

    def text_files(self) -> tuple[list[FileEntry], list[str]]:
        """Return the files that are data or text, and warnings of the others in directories.

        Raises:
            DataError: A file cannot be read, or none of a path is data or text.
        """
        is_text: dict[str, bool] = {}
        warnings = []
        for of_path in self.path_matches:
            is_empty = not of_path.matches
            for directory in of_path.directories:
                binary = [
                    match.path
                    for match in directory.unknown
                    if not _known_text(match, is_text, of_path.spelled)
                ]
                is_empty = is_empty and len(binary) == len(directory.unknown)
                warnings += _left_out(directory.path, binary, directory.count, "text")
            if is_empty:
                for warning in warnings:
                    logger.warning("%s", warning)
                raise _no_file(of_path.spelled, "holds no text")
        kept = [file for file in self.files if not file.may_be_binary or is_text[file.name]]
        return kept, warnings


def find_files(paths: Sequence[str], field: str = "data.path") -> FileList:
    """Return the files that match paths, each once, ordered by name.

    Args:
        paths: Files, globs or directories.
        field: Config field of the paths, for messages.

    Raises:
        DataError: A path matches no file, cannot be listed, or matches what is not a regular file.
    """
    found: dict[str, FileEntry] = {}
    path_matches = []
    for path in paths:
        if not path.strip():
            raise DataError(f"{field} has an empty path: name files, globs or directories")
        spelled = f"{field}={path}"
        of_path = _PathMatches(spelled=spelled, matches=[], directories=[])
        is_name = "{" in path and os.path.exists(os.path.expanduser(path))
        patterns = [path] if is_name else list(_without_braces(path))
        _check_prefixes(patterns, spelled)
        try:
            for pattern in patterns:
                _match(pattern, of_path)
        except DataError as error:
            raise DataError(f"{spelled}: {error}") from error
        except (OSError, ImportError, ValueError, NotImplementedError, RuntimeError) as error:
            raise DataError(f"{spelled} cannot be listed: {error}") from error
        unknown = [match for each in of_path.directories for match in each.unknown]
        if not of_path.matches and not unknown:
            exists = any(epath.Path(pattern).exists() for pattern in patterns)
            raise _no_file(spelled, "holds no text" if exists else "matches no file")
        for match in of_path.matches:
            entry = _entry(match, spelled)
            found[entry.name] = entry
        for match in unknown:
            entry = _entry(match, spelled)
            found.setdefault(entry.name, entry._replace(may_be_binary=True))
        path_matches.append(of_path)
    return FileList(files=[found[name] for name in sorted(found)], path_matches=path_matches)


def absolute_name(path: epath.Path) -> str:
    """Return a path that has a common directory with every other path."""
    return f"/{path}" if "://" in str(path) else os.path.abspath(path)


def _no_file(spelled: str, what: str) -> DataError:
    return DataError(f"{spelled} {what} (from {os.getcwd()}): check it, and quote globs")


def _check_prefixes(patterns: Sequence[str], spelled: str) -> None:
    """Raise a DataError for a URL whose prefix `epath` does not read."""
    for pattern in patterns:
        try:
            epath.Path(pattern)
        except KeyError as error:
            raise DataError(
                f"{spelled} begins with {error.args[0]}, which is not read: expected a local path, "
                "or one that begins with gs://, s3://, az:// or hf://. Download the files, and "
                "give their local path (without file://)"
            ) from error


def _entry(match: _MatchedPath, spelled: str) -> FileEntry:
    """Return the file of a match: the .bin of an .idx, any other as it is.

    Raises:
        DataError: It cannot be read, or it or its index is not a regular file.
    """
    path, name, status = match
    if "://" in path:
        return _bucket_entry(epath.Path(path))
    stem, suffix = os.path.splitext(path) if path.endswith((".idx", ".bin")) else (path, "")
    if suffix == ".idx":
        path, name, status = f"{stem}.bin", None, None
        if not os.path.exists(path):
            raise _no_data(epath.Path(match.path), os.path.basename(path))
    if status is None or not stat.S_ISREG(status.st_mode):
        is_named = spelled.endswith(f"={path}")
        where = spelled if is_named else f"{spelled}: {epath.Path(path)}"
        status = _checked_status(path, status, where)
    index = None
    if suffix in (".idx", ".bin") and os.path.lexists(f"{stem}.idx"):
        file = f"{stem}.idx"
        of_index = _checked_status(file, None, f"{spelled}: {epath.Path(file)}")
        index = FileEntry(file, os.path.abspath(file), of_index.st_size, of_index.st_mtime_ns)
    name = os.path.abspath(path) if name is None else name
    return FileEntry(path, name, status.st_size, status.st_mtime_ns, index=index)


def _bucket_entry(path: epath.Path) -> FileEntry:
    """Return a file in a bucket: the .bin of an .idx, any other as it is."""
    data = path.with_suffix(".bin") if path.suffix == ".idx" else path
    if data != path and not data.exists():
        raise _no_data(path, data.name)
    try:
        status = data.stat()
        index = None
        if data.suffix == ".bin" and (file := index_file(data)).exists():
            of_index = file.stat()
            index = FileEntry(str(file), absolute_name(file), of_index.length, of_index.mtime)
    except OSError as error:
        raise DataError(f"{data} cannot be read: {error.strerror or error}") from error
    return FileEntry(str(data), absolute_name(data), status.length, status.mtime, index=index)


def _no_data(path: epath.Path, name: str) -> DataError:
    return DataError(f"{path} has no {name} beside it, which holds its token ids")


def _checked_status(path: str, status: os.stat_result | None, where: str) -> os.stat_result:
    """Return the status of a local file; raise a DataError unless it is a regular one."""
    try:
        status = os.stat(path) if status is None else status
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise DataError(
                f"{where} is a symbolic link that leads back to itself: expected a link to a file. "
                "Point it at the file, or remove it"
            ) from error
        raise DataError(f"{where} cannot be read: {error.strerror or error}") from error
    if (kind := kind_of_mode(status.st_mode)) is not None:
        raise DataError(
            f"{where} is {kind}: expected a regular file, which can be read more than once. Write "
            "its content to a file, and give that"
        )
    return status


def _match(pattern: str, of_path: _PathMatches) -> None:
    """Add what one pattern without braces matches."""
    path = epath.Path(pattern).expanduser()
    if path.is_dir():
        _list_below(path, of_path)
        return
    if path.exists():
        of_path.matches.append(_MatchedPath(str(path)))
        return
    if "://" in pattern:
        first = re.search(r"[^/]*[*?\[]", pattern)
        if first is None:
            return
        root = pattern[: first.start()]
        tail = pattern[first.start() :]
        matches = [match for match in epath.Path(root).glob(tail) if not match.is_dir()]
        of_path.matches.extend(_MatchedPath(str(match)) for match in matches)
        return
    if recursive := _RECURSIVE.match(str(path)):  # `glob` follows loops of links without end
        for root in glob.glob(recursive["root"]) if recursive["root"] else ["."]:
            for _ in _directories(root, needs_all=False):
                pass
    for name in glob.glob(str(path), recursive=True):
        try:
            status = os.stat(name)
        except OSError:  # reported with the name of the file
            of_path.matches.append(_MatchedPath(name))
        else:
            if not stat.S_ISDIR(status.st_mode):
                of_path.matches.append(_MatchedPath(name, None, status))


def _list_below(directory: epath.Path, of_path: _PathMatches) -> None:
    """Add the files of a directory; warn of those that are not regular."""
    unknown = []
    special = []
    count = 0
    for match in _walk(directory):
        count += 1
        if match.status is not None and not stat.S_ISREG(match.status.st_mode):
            special.append(match.path)
        elif match.path.lower().endswith(DATA_SUFFIXES):
            of_path.matches.append(match)
        else:
            unknown.append(match)
    expected = "regular files, but FIFOs, sockets or devices"
    for warning in _left_out(str(directory), special, count, expected):
        logger.warning("%s", warning)
    of_path.directories.append(_Directory(path=str(directory), count=count, unknown=unknown))


def _left_out(directory: str, paths: Sequence[str], count: int, expected: str) -> list[str]:
    """Return the warning of files of a directory that are not read, if there are any."""
    if not paths:
        return []
    return [
        f"{directory}: {len(paths)} of {count} files are left out because they are not {expected}, "
        f"{epath.Path(min(paths))} among them"
    ]


def _walk(directory: epath.Path) -> Iterator[_MatchedPath]:
    """Yield every file below a directory that is not hidden; buckets have no recursive glob."""
    if "://" not in str(directory):
        for folder, files in _directories(str(directory), needs_all=True):
            name = os.path.join(os.path.abspath(folder), "")
            for file in files:
                yield _MatchedPath(file.path, name + file.name, file.stat())
        return
    for path in directory.iterdir():
        if path.is_dir() and not path.name.startswith("."):
            yield from _walk(path)
        elif not path.name.startswith("."):
            yield _MatchedPath(str(path), absolute_name(path))


def _directories(root: str, *, needs_all: bool) -> Iterator[tuple[str, list[os.DirEntry[str]]]]:
    """Yield a local directory, those below it that are not hidden, and the files of each.

    Args:
        root: Directory.
        needs_all: Whether a directory that cannot be read is an error, or has no files.

    Raises:
        DataError: A symbolic link leads back to a directory above it.
        OSError: A directory cannot be read, where all are needed.
    """
    waiting: list[tuple[str, dict[tuple[int, int], str]]] = [(root, {})]
    while waiting:
        directory, above = waiting.pop()
        try:
            status = os.stat(directory)
            with os.scandir(directory) as listed:
                entries = [entry for entry in listed if not entry.name.startswith(".")]
        except OSError:
            if needs_all:
                raise
            continue
        key = status.st_dev, status.st_ino
        if key in above:
            raise DataError(
                f"{directory} leads back to {above[key]}, which contains it, so that the files "
                "below have no end: remove the symbolic link, or give the files"
            )
        above = {**above, key: directory}
        files: list[os.DirEntry[str]] = []
        for entry in entries:
            if _is_folder(entry):
                waiting.append((entry.path, above))
            else:
                files.append(entry)
        yield directory, files


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a directory, or a link to one; False for links without end."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def _known_text(match: _MatchedPath, is_text: dict[str, bool], spelled: str) -> bool:
    """Return whether a file begins with text, and remember it by its name."""
    path = epath.Path(match.path)
    name = absolute_name(path) if match.name is None else match.name
    if name not in is_text:
        try:
            is_text[name] = _is_text(path)
        except OSError as error:
            raise DataError(f"{spelled} cannot be listed: {error}") from error
    return is_text[name]


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
