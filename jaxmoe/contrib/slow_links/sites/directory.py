# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`DirectoryTransport`: sites that share a directory, such as one on NFS.

    rounds/<number>/<kind>-<member>      a message
    closings/<number>-<kind>             how a step closed

Files are frames. Each is written under a temporary name and linked to its own: it appears whole,
and an existing one is never replaced. So of two sites that close a step at the same moment one
succeeds, and the other reads its list. Messages of older rounds are deleted; closings are kept for
`KEPT_ROUNDS` rounds.

A damaged file counts as missing. Links to files, pipes and devices are not opened. The file system
must have hard links; clocks of hosts are not compared.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
import shutil
import stat
import uuid
from collections.abc import Iterator, Mapping

from jaxmoe.contrib.slow_links.sites.errors import FrameError, LeftOutError, TransportError
from jaxmoe.contrib.slow_links.sites.frames import Frame, Kind, encode_header, read_frame
from jaxmoe.contrib.slow_links.sites.transport import (
    CLOSING_BYTES,
    KEPT_ROUNDS,
    Closing,
    Collected,
    MessageSizes,
    decode_closing,
)

logger = logging.getLogger(__name__)

_ATTEMPTS = 5
_CLOSING_BOUNDS = {Kind.CLOSING: CLOSING_BYTES}


class DirectoryClosings:
    """Records closings in a directory, for sites or coordinators that share it.

    Args:
        directory: Directory of the closings; made if need be.
        member: Number of this writer in its frames.
        key: Shared secret.
    """

    def __init__(self, directory: str | os.PathLike[str], member: int, key: bytes | None = None):
        self._directory = pathlib.Path(directory)
        self._member = member
        self._key = key

    def decide(self, number: int, kind: Kind, closing: Closing) -> Closing:
        """Record a closing unless there is one, as `Transport.decide` does."""
        if (saved := self.find(number, kind)) is not None:
            return saved
        newest = self.newest()
        if newest is not None and newest > number:
            raise LeftOutError(f"round {newest} has ended, and round {number} was not closed")
        frame = Frame(
            kind=Kind.CLOSING, number=number, member=self._member, payload=closing.encode(kind)
        )
        path = self._path(number, kind)
        if not _link(path, frame, self._key):
            return self._read(path, number, kind)
        if kind == Kind.FINGERPRINT:
            self._forget(number - KEPT_ROUNDS)
        return closing

    def find(self, number: int, kind: Kind) -> Closing | None:
        """Return the record of a step, None while there is none."""
        try:
            return self._read(self._path(number, kind), number, kind)
        except FileNotFoundError:
            return None

    def newest(self) -> int | None:
        """Return the newest round that has ended."""
        numbers = (number for number, kind in self._numbers() if kind == Kind.FINGERPRINT)
        return max(numbers, default=None)

    def _path(self, number: int, kind: Kind) -> pathlib.Path:
        return self._directory / f"{number:010d}-{kind.name.lower()}"

    def _read(self, path: pathlib.Path, number: int, kind: Kind) -> Closing:
        try:
            frame = _read(path, _CLOSING_BOUNDS, self._key, number)
            found, closing = decode_closing(frame.payload)
        except FrameError as error:
            raise TransportError(f"{path} cannot be read: {error}") from error
        if found != kind:
            raise TransportError(f"{path} closes {found.name}, not {kind.name}")
        return closing

    def _numbers(self) -> Iterator[tuple[int, Kind]]:
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(self._directory):
                number, _, kind = name.partition("-")
                if number.isdecimal() and kind.upper() in Kind.__members__:
                    yield int(number), Kind[kind.upper()]

    def _forget(self, before: int) -> None:
        for number, kind in list(self._numbers()):
            if number < before:
                with contextlib.suppress(OSError):
                    self._path(number, kind).unlink()


class DirectoryTransport:
    """A board in a directory.

    Args:
        directory: Directory that all sites share; made if need be. Each start of all sites has
            its own.
        member: Number of this site.
        sizes: Largest sizes of messages.
        key: Shared secret.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        member: int,
        sizes: MessageSizes,
        key: bytes | None = None,
    ):
        root = pathlib.Path(directory)
        self._rounds = root / "rounds"
        self._member, self._bounds, self._key = member, sizes.bounds(), key
        self._closings = DirectoryClosings(root / "closings", member, key)
        self._held: dict[tuple[int, Kind], dict[int, bytes]] = {}
        self._damaged: dict[pathlib.Path, tuple[int, int]] = {}

    def post(self, number: int, kind: Kind, payload: bytes) -> None:
        """Post a message, as `Transport.post` does."""
        frame = Frame(kind=kind, number=number, member=self._member, payload=payload)
        _link(self._folder(number) / f"{kind.name.lower()}-{self._member}", frame, self._key)

    def collect(self, number: int, kind: Kind) -> Collected:
        """Return what is there, as `Transport.collect` does."""
        # Looked for first, so that a round that ended before has its closing in the answer.
        newest = self._closings.newest()
        payloads = self._held.setdefault((number, kind), {})
        for path, member in self._files(number, kind):
            if member not in payloads and (payload := self._payload(path, number, kind, member)):
                payloads[member] = payload[0]
        is_step = kind in (Kind.UPDATE, Kind.RECEIPT, Kind.FINGERPRINT)
        closing = self._closings.find(number, kind) if is_step else None
        return Collected(payloads=dict(payloads), closing=closing, newest=newest)

    def decide(self, number: int, kind: Kind, closing: Closing) -> Closing:
        """Record how a step closed, as `Transport.decide` does."""
        return self._closings.decide(number, kind, closing)

    def forget(self, number: int) -> None:
        """Delete the messages of older rounds."""
        self._held.clear()
        self._damaged.clear()
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(self._rounds):
                if name.isdecimal() and int(name) < number:
                    shutil.rmtree(self._rounds / name, ignore_errors=True)

    def close(self) -> None:
        """Release nothing: there are no connections."""

    def _folder(self, number: int) -> pathlib.Path:
        return self._rounds / f"{number:010d}"

    def _files(self, number: int, kind: Kind) -> Iterator[tuple[pathlib.Path, int]]:
        folder = self._folder(number)
        with contextlib.suppress(FileNotFoundError):
            for name in sorted(os.listdir(folder)):
                kind_name, _, member = name.partition("-")
                if kind_name == kind.name.lower() and member.isdecimal():
                    yield folder / name, int(member)

    def _payload(self, path: pathlib.Path, number: int, kind: Kind, member: int) -> list[bytes]:
        """Return the payload of a message; nothing if it is damaged."""
        try:
            status = path.lstat()
            version = (status.st_size, status.st_mtime_ns)
            if self._damaged.get(path) == version:
                return []
            try:
                frame = _read(path, {kind: self._bounds[kind]}, self._key, number)
                if frame.member != member:
                    raise FrameError(f"frame is of member {frame.member}")
                return [frame.payload]
            except FrameError as error:
                logger.warning("%s is ignored: %s", path, error)
                self._damaged[path] = version
                return []
        except FileNotFoundError:
            return []


def _read(path: pathlib.Path, bounds: Mapping[Kind, int], key: bytes | None, number: int) -> Frame:
    """Return the frame in a file.

    Raises:
        FileNotFoundError: There is no file.
        FrameError: It is not a regular file with one frame.
        TransportError: The file system does not answer.
    """
    try:
        opened = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(opened, "rb") as file:
            if not stat.S_ISREG(os.fstat(opened).st_mode):
                raise FrameError("it is not a regular file")
            frame = read_frame(file.read, bounds, key=key, number=number)
            if file.read(1):
                raise FrameError("bytes follow the frame")
            return frame
    except FileNotFoundError:
        raise
    except IsADirectoryError as error:
        raise FrameError("it is a directory") from error
    except OSError as error:
        if path.is_symlink():
            raise FrameError("it is a symbolic link") from error
        raise TransportError(f"{path} cannot be read: {error.strerror}") from error


def _link(path: pathlib.Path, frame: Frame, key: bytes | None) -> bool:
    """Write a frame to a new file; return False if the file exists.

    Raises:
        TransportError: It cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    for attempt in range(_ATTEMPTS):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("xb") as file:
                file.write(encode_header(frame, key))
                file.write(frame.payload)
                file.flush()
                os.fsync(file.fileno())
            os.link(temporary, path)
            return True
        except FileExistsError:
            return False
        except FileNotFoundError as error:  # the round was deleted meanwhile
            if attempt == _ATTEMPTS - 1:
                raise TransportError(f"{path} cannot be written: {error.strerror}") from error
        except OSError as error:
            raise TransportError(
                f"{path} cannot be written ({error.strerror}): the directory of sites needs a"
                " file system with hard links"
            ) from error
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
    return False
