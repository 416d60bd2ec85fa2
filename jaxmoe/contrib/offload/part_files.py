# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Keeps the parts of an optimiser state in memory-mapped files, two versions of each.

    <directory>/<version>/<module>-<number>    arrays of a part, one after another
    <directory>/lock                           locked while a process uses the directory

A pass reads every part of the current version in order and writes it to the other one: a thread
reads part i + 1 while part i is used, another writes part i - 1. The other version becomes the
current one if the step is accepted; the files of the current one are never written to.

The files are a cache: a checkpoint has the state, and every start writes the files anew. Their
blocks are reserved at the start, so that a disk without space is an error there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import mmap
import os
import pathlib
import shutil
import threading
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

_ALIGNMENT = 64
_VERSIONS = 2


@dataclasses.dataclass(frozen=True, slots=True)
class FilePiece:
    """Place of an array in the file of its part."""

    shape: tuple[int, ...]
    dtype: np.dtype
    offset: int
    """First byte."""

    @property
    def size(self) -> int:
        """Bytes of the array."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def of(self, buffer: Any) -> np.ndarray:
        """Return the array in the bytes of its part, which it shares."""
        count = int(np.prod(self.shape, dtype=np.int64))
        return np.frombuffer(buffer, self.dtype, count, self.offset).reshape(self.shape)


@dataclasses.dataclass(frozen=True, slots=True)
class PartLayout:
    """Arrays of one part."""

    name: str
    """Name of its file."""
    pieces: tuple[FilePiece, ...]

    @classmethod
    def of(cls, name: str, arrays: Sequence[tuple[tuple[int, ...], Any]]) -> PartLayout:
        """Return the layout of arrays of some shapes and dtypes."""
        pieces = []
        offset = 0
        for shape, dtype in arrays:
            pieces.append(FilePiece(shape, np.dtype(dtype), offset))
            offset += -(-pieces[-1].size // _ALIGNMENT) * _ALIGNMENT
        return cls(name, tuple(pieces))

    @property
    def size(self) -> int:
        """Bytes of the arrays."""
        return sum(piece.size for piece in self.pieces)

    @property
    def length(self) -> int:
        """Bytes of the file."""
        return max(_ALIGNMENT, *(piece.offset + piece.size for piece in self.pieces))


class Buffers:
    """Counts the bytes of the parts that are in host memory at once."""

    def __init__(self):
        self._lock = threading.Lock()
        self.bytes = 0
        """Bytes now."""
        self.most = 0
        """Largest number of bytes so far."""

    def new(self, size: int) -> np.ndarray:
        """Return bytes that count until nothing refers to them."""
        buffer = np.empty(size, np.uint8)
        self._add(size)
        weakref.finalize(buffer, self._add, -size)
        return buffer

    @contextlib.contextmanager
    def holding(self, size: int) -> Iterator[None]:
        """Count bytes for the length of a block."""
        self._add(size)
        try:
            yield
        finally:
            self._add(-size)

    def _add(self, size: int) -> None:
        with self._lock:
            self.bytes += size
            self.most = max(self.most, self.bytes)


class PartFiles:
    """Files of all parts of one state; one process holds their directory.

    Args:
        directory: Directory of the files, made if missing.
        layouts: Parts in the order of their updates.

    Raises:
        ValueError: The directory cannot be written, has no space, or another process uses it.
    """

    def __init__(self, directory: str | os.PathLike[str], layouts: Sequence[PartLayout]):
        self.directory, self.layouts = pathlib.Path(directory), tuple(layouts)
        self.version = 0
        """Number of accepted passes; its files are `version % 2`."""
        self.bytes_read = 0
        self.bytes_written = 0
        self.buffers = Buffers()
        self._threads = [
            ThreadPoolExecutor(1, thread_name_prefix=f"optimizer files {what}")
            for what in ("in", "out")
        ]
        self._lock_file: Any = None
        try:
            self._reserve()
        except OSError as error:
            self.close()
            needed = _VERSIONS * sum(layout.length for layout in self.layouts)
            raise ValueError(
                f"execution.offload.optimizer=files needs {needed / 1e6:.1f} MB in"
                f" {self.directory}, which cannot be written ({error.strerror}): free space, or set"
                " execution.offload.directory to a directory on another disk"
            ) from error

    @property
    def size(self) -> int:
        """Bytes of the state; a pass reads and writes each once."""
        return sum(layout.size for layout in self.layouts)

    def facts(self) -> dict[str, Any]:
        """Return sizes and traffic since the start, as JSON."""
        return {
            "directory": str(self.directory),
            "parts": len(self.layouts),
            "bytes": self.size,
            "bytes_read": self.bytes_read,
            "bytes_written": self.bytes_written,
            "host_bytes": self.buffers.most,
        }

    def path(self, number: int, version: int) -> pathlib.Path:
        """Return the file of a part."""
        return self.directory / str(version % _VERSIONS) / self.layouts[number].name

    def store(self, number: int, place: int, array: np.ndarray) -> None:
        """Write one array of a part of the current version, at a start."""
        piece = self.layouts[number].pieces[place]
        with self._map(number, self.version, mmap.ACCESS_WRITE) as mapped:
            np.copyto(piece.of(mapped), array)

    def piece(self, number: int, place: int) -> np.ndarray:
        """Return a copy of one array of a part of the current version."""
        piece = self.layouts[number].pieces[place]
        with self._map(number, self.version, mmap.ACCESS_READ) as mapped:
            return piece.of(mapped).copy()

    def begin(self) -> Pass:
        """Return a pass over all parts, whose first part is being read."""
        return Pass(self, *self._threads)

    def load(self, number: int) -> list[np.ndarray]:
        """Return the arrays of a part of the current version, in a buffer of their own."""
        layout = self.layouts[number]
        buffer = self.buffers.new(layout.length)
        with self._map(number, self.version, mmap.ACCESS_READ) as mapped:
            np.copyto(buffer, np.frombuffer(mapped, np.uint8))
        self.bytes_read += layout.size
        return [piece.of(buffer) for piece in layout.pieces]

    def store_next(self, number: int, arrays: Sequence[Any]) -> None:
        """Write a part of the next version, once it is computed."""
        jax.block_until_ready(arrays)
        layout = self.layouts[number]
        with (
            self.buffers.holding(layout.size),
            self._map(number, self.version + 1, mmap.ACCESS_WRITE) as mapped,
        ):
            for piece, array in zip(layout.pieces, arrays, strict=True):
                np.copyto(piece.of(mapped), np.asarray(array))
        self.bytes_written += self.layouts[number].size

    def close(self) -> None:
        """Remove the files, which are of no use without the process."""
        for threads in self._threads:
            threads.shutdown(wait=True, cancel_futures=True)
        if self._lock_file is None:
            return
        for version in range(_VERSIONS):
            shutil.rmtree(self.directory / str(version), ignore_errors=True)
        self._lock_file.close()
        self._lock_file = None

    def _reserve(self) -> None:
        """Take the directory, and make files of full length.

        Raises:
            OSError: The directory cannot be written, or has no space.
            ValueError: Another process uses it.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        lock = (self.directory / "lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.close()
            raise ValueError(
                f"execution.offload.directory={self.directory} holds the optimizer state of"
                " another run that trains: give each run its own directory"
            ) from error
        self._lock_file = lock
        for version in range(_VERSIONS):
            shutil.rmtree(self.directory / str(version), ignore_errors=True)  # of a killed run
            (self.directory / str(version)).mkdir()
            for number, layout in enumerate(self.layouts):
                with self.path(number, version).open("wb") as file:
                    os.posix_fallocate(file.fileno(), 0, layout.length)

    @contextlib.contextmanager
    def _map(self, number: int, version: int, access: int) -> Iterator[mmap.mmap]:
        """Map a file; arrays in it must be dropped within the block or with their last use."""
        with self.path(number, version).open("r+b") as file:
            yield mmap.mmap(file.fileno(), 0, access=access)  # unmapped with the last array in it


class Pass:
    """One reading of all parts in order, with the writing of their new values.

    Host memory holds three parts: the one that is used, the next one and the one before it.

    Args:
        files: Files of the parts.
        reader: Thread that reads ahead.
        writer: Thread that writes behind.
    """

    def __init__(self, files: PartFiles, reader: ThreadPoolExecutor, writer: ThreadPoolExecutor):
        self._files = files
        self._reader = reader
        self._writer = writer
        self._next = 0
        self._coming: Future[list[np.ndarray]] | None = reader.submit(files.load, 0)
        self._leaving: Future[None] | None = None
        self._last: Sequence[Any] = ()

    def take(self) -> list[np.ndarray]:
        """Return the arrays of the next part, and begin to read the one after it.

        Waits until the new values of the part before are computed, which frees its memory.
        """
        assert self._coming is not None  # there is a part left
        arrays = self._coming.result()
        self._coming = None
        jax.block_until_ready(self._last)
        self._last = ()
        self._next += 1
        if self._next < len(self._files.layouts):
            self._coming = self._reader.submit(self._files.load, self._next)
        return arrays

    def put(self, arrays: Sequence[Any]) -> None:
        """Begin to write the new values of the part taken last, when the one before is written."""
        self.join()
        self._last = arrays
        self._leaving = self._writer.submit(self._files.store_next, self._next - 1, arrays)

    def finish(self, *, is_accepted: bool) -> None:
        """End the pass: make the next version the current one, or leave the current one.

        Args:
            is_accepted: Whether the new values hold; all must have been put.
        """
        coming = self._coming
        self._coming = None
        if coming is not None:
            coming.result()
        self.join()
        self._files.version += int(is_accepted)

    def join(self) -> None:
        """Wait until all new values are in the files."""
        leaving = self._leaving
        self._leaving = None
        if leaving is not None:
            leaving.result()
