# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Encodes and decodes frames, the form of every message between sites.

    bytes      field
    4          magic, "jxmI"
    2          version
    1          kind
    1          zero
    8          epoch of the coordinator, 0 without one
    8          number of the round
    4          member: the site that wrote it
    8          length of the payload in bytes
    32         SHA-256 of the fields above and the payload
    32         HMAC-SHA256 of the fields above, zeros without a key
    length     payload

All integers are unsigned and big-endian. The HMAC covers the payload through its digest, so that a
peer without the key is refused before a byte of its payload is read. A reader names the kinds that
it expects, each with the largest length; nothing is allocated for a longer one. Payloads are opaque
bytes: nothing is unpickled.

The key keeps out peers that do not have it. It neither encrypts, nor protects from a machine on the
path that repeats frames of the same round: use a private network for that.

To add a kind: a member of `Kind` in `jaxmoe/contrib/slow_links/sites/frames.py`.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import hmac
import io
import struct
from collections.abc import Callable, Mapping

from jaxmoe.contrib.slow_links.sites.errors import FrameError

MAGIC = b"jxmI"
VERSION = 1

_FIELDS = struct.Struct("!4sHBxQQIQ")
_HASH = hashlib.sha256().digest_size
HEADER_BYTES = _FIELDS.size + 2 * _HASH
"""Bytes of a frame in front of its payload."""
_UNSIGNED = bytes(_HASH)
_CHUNK = 1 << 20

MAX_MEMBERS = 4096
"""Largest number of members; their numbers are smaller than this."""
COORDINATOR = (1 << 32) - 1
"""Number in the `member` field of a coordinator's frames."""
NUMBERS_BYTES = 4 * (1 + MAX_MEMBERS)
"""Largest size of a list of members."""


class Kind(enum.IntEnum):
    """Purpose of a frame."""

    UPDATE = 1
    """Encoded outer gradient of a site."""
    FINGERPRINT = 2
    """Fingerprint of the slow copy after a round."""
    STATE = 3
    """Slow copy and outer state, for sites that join or differ."""
    JOIN = 4
    """Request to be admitted."""
    RECEIPT = 5
    """Members whose update a site holds."""
    CLOSING = 16
    """How a step of a round closed, proposed or recorded."""
    HELLO = 32
    """First request of a connection."""
    COLLECT = 33
    """Request for messages and the closing of a step."""
    ANSWER = 48
    """Last frame of a coordinator's answer."""
    REFUSED = 49
    """Refusal of a request, with the reason as text."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """One message."""

    kind: Kind
    number: int
    """Number of the round."""
    member: int
    """Site that wrote it, or `COORDINATOR`."""
    payload: bytes = b""
    epoch: int = 0
    """Epoch of the coordinator that the message is meant for; 0 without one."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """Fields of a frame that were checked before its payload is read."""

    frame: Frame
    """Frame with an empty payload."""
    length: int
    """Bytes of the payload."""
    digest: bytes
    fields: bytes
    """Bytes that the digest covers in front of the payload."""


def encode_header(frame: Frame, key: bytes | None = None) -> bytes:
    """Return the `HEADER_BYTES` bytes that stand in front of the payload of a frame.

    Args:
        frame: Message.
        key: Shared secret with which it is signed.
    """
    fields = _FIELDS.pack(
        MAGIC,
        VERSION,
        frame.kind,
        frame.epoch,
        frame.number,
        frame.member,
        len(frame.payload),
    )
    signed = fields + _digest(fields, frame.payload)
    return signed + _signature(signed, key)


def encode(frame: Frame, key: bytes | None = None) -> bytes:
    """Return a frame as bytes.

    Args:
        frame: Message.
        key: Shared secret with which it is signed.
    """
    return encode_header(frame, key) + frame.payload


def decode_header(
    data: bytes,
    bounds: Mapping[Kind, int],
    *,
    key: bytes | None = None,
    number: int | None = None,
) -> Header:
    """Return the checked header of a frame.

    Args:
        data: First `HEADER_BYTES` bytes of the frame.
        bounds: Largest length of a payload in bytes, of each kind that is expected.
        key: Shared secret; None expects an unsigned frame.
        number: Round that the frame must be of; None accepts any.

    Raises:
        FrameError: It is not an expected frame; the message says why.
    """
    if len(data) != HEADER_BYTES:
        raise FrameError(f"frame ends after {len(data)} bytes of its header of {HEADER_BYTES}")
    fields = data[: _FIELDS.size]
    digest = data[_FIELDS.size : _FIELDS.size + _HASH]
    signature = data[_FIELDS.size + _HASH :]
    magic, version, kind, epoch, found, member, length = _FIELDS.unpack(fields)
    if magic != MAGIC:
        raise FrameError(f"frame begins with {magic!r}, not {MAGIC!r}")
    if version != VERSION:
        raise FrameError(f"frame has version {version}, not {VERSION}: update all sites")
    if not hmac.compare_digest(signature, _signature(fields + digest, key)):
        why = "is not signed with the key" if key else "is signed, and there is no key to check it"
        raise FrameError(f"frame of member {member} {why}: give all sites the same key")
    if kind not in bounds:
        raise FrameError(f"frame has kind {kind}, expected {_names(bounds)}")
    kind = Kind(kind)
    if length > bounds[kind]:
        raise FrameError(f"{kind.name} has {length} bytes, at most {bounds[kind]} are expected")
    if number is not None and found != number:
        raise FrameError(f"{kind.name} is of round {found}, not {number}")
    if member >= MAX_MEMBERS and member != COORDINATOR:
        raise FrameError(f"member {member} must be less than {MAX_MEMBERS}")
    frame = Frame(kind=kind, number=found, member=member, epoch=epoch)
    return Header(frame=frame, length=length, digest=digest, fields=fields)


def read_frame(
    read: Callable[[int], bytes],
    bounds: Mapping[Kind, int],
    *,
    key: bytes | None = None,
    number: int | None = None,
) -> Frame:
    """Return the next frame of a stream.

    Args:
        read: Returns at most so many bytes, and none at the end of the stream.
        bounds: Largest length of a payload in bytes, of each kind that is expected.
        key: Shared secret; None expects an unsigned frame.
        number: Round that the frame must be of; None accepts any.

    Raises:
        FrameError: It is not an expected frame, or the stream ends within it.
    """
    header = decode_header(_read(read, HEADER_BYTES), bounds, key=key, number=number)
    payload = _read(read, header.length)
    if len(payload) != header.length:
        raise FrameError(f"payload ends after {len(payload)} of {header.length} bytes")
    if not hmac.compare_digest(_digest(header.fields, payload), header.digest):
        raise FrameError(f"{header.frame.kind.name} differs from its SHA-256")
    return dataclasses.replace(header.frame, payload=payload)


def decode(
    data: bytes,
    bounds: Mapping[Kind, int],
    *,
    key: bytes | None = None,
    number: int | None = None,
) -> Frame:
    """Return the frame that `encode` made; the arguments are those of `read_frame`.

    Raises:
        FrameError: It is not an expected frame, or more bytes follow.
    """
    stream = io.BytesIO(data)
    frame = read_frame(stream.read, bounds, key=key, number=number)
    if more := len(data) - stream.tell():
        raise FrameError(f"{more} bytes follow the frame")
    return frame


def encode_numbers(numbers: tuple[int, ...]) -> bytes:
    """Return a list of members as bytes: their count, then each."""
    return struct.pack(f"!{1 + len(numbers)}I", len(numbers), *numbers)


def decode_numbers(data: bytes) -> tuple[tuple[int, ...], bytes]:
    """Return a list of members and the bytes that follow it.

    Raises:
        FrameError: The list is cut, or has a number that no member has.
    """
    if len(data) < 4:
        raise FrameError("list of members is cut")
    (count,) = struct.unpack_from("!I", data)
    if count > MAX_MEMBERS or len(data) < 4 * (1 + count):
        raise FrameError(f"list of {count} members is cut, or longer than {MAX_MEMBERS}")
    numbers = struct.unpack_from(f"!{count}I", data, 4)
    if any(number >= MAX_MEMBERS for number in numbers):
        raise FrameError(f"list of members has {max(numbers)}, at least {MAX_MEMBERS}")
    return numbers, data[4 * (1 + count) :]


def _read(read: Callable[[int], bytes], length: int) -> bytes:
    """Return so many bytes, fewer at the end of the stream; memory grows with what arrives."""
    parts = []
    bytes_left = length
    while bytes_left and (part := read(min(bytes_left, _CHUNK))):
        parts.append(part)
        bytes_left -= len(part)
    return b"".join(parts)


def _digest(fields: bytes, payload: bytes) -> bytes:
    digest = hashlib.sha256(fields)
    digest.update(payload)
    return digest.digest()


def _signature(signed: bytes, key: bytes | None) -> bytes:
    return hmac.digest(key, signed, "sha256") if key else _UNSIGNED


def _names(bounds: Mapping[Kind, int]) -> str:
    return " or ".join(f"{kind.name} ({int(kind)})" for kind in bounds)
