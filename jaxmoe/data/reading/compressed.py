# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Reads the content of a file in parts, decompressed according to its suffix.

A gzip member always ends with a checksum. A zstd frame may have none, and then damage may change
its content without an error.

To add a compression: `jaxmoe/data/reading/compressed.py` (its suffix),
`tests/jaxmoe/data/test_formats.py` (a case).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import IO, Any

from etils import epath

from jaxmoe.data.batch import DataError
from jaxmoe.optional import require

COMPRESSED = (".gz", ".zst")
"""Suffixes of compressed files."""
_CHUNK = 2**20
_COMPRESSED_CHUNK = 2**16
"""Bytes that are decompressed at once: their content may be many times longer."""
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_ZSTD_CHECKSUM = 1 << 2
"""Bit of the byte after the magic number, the frame header descriptor (RFC 8878, 3.1.1.1.1)."""


def plain_name(path: epath.Path) -> str:
    """Return the name of a file in small letters, without the suffix of its compression.

    Args:
        path: Any path.
    """
    plain = path.name.lower()
    for suffix in COMPRESSED:
        plain = plain.removesuffix(suffix)
    return plain


def chunks(path: epath.Path, on_no_checksum: Callable[[], object]) -> Iterator[bytes]:
    """Yield the content of a file, decompressed according to its suffix.

    Args:
        path: Local file, or file in a bucket.
        on_no_checksum: Function to call at each frame without a checksum.

    Raises:
        DataError: The compressed content is damaged or truncated.
    """
    with path.open("rb") as stream:
        if path.suffix.lower() == ".gz":
            yield from _decompress(
                path, stream, on_no_checksum, lambda: zlib.decompressobj(wbits=31)
            )
        elif path.suffix.lower() == ".zst":
            # Large archives are made with `zstd --long=31`, which needs a window of 2 GB.
            zstd = require("zstandard").ZstdDecompressor(max_window_size=2**31)
            yield from _decompress(path, stream, on_no_checksum, zstd.decompressobj)
        else:
            while chunk := stream.read(_CHUNK):
                yield chunk


def _decompress(
    path: epath.Path, stream: IO[bytes], on_no_checksum: Callable[[], object], make: Any
) -> Iterator[bytes]:
    """Yield the content of all frames in order; an unfinished frame is an error."""
    damage = zlib.error
    if path.suffix.lower() == ".zst":
        damage = require("zstandard").ZstdError
    frame: Any = None
    head = b""
    offset = 0
    count = 0
    num_frames = 0
    is_open = False
    while chunk := stream.read(min(_CHUNK, _COMPRESSED_CHUNK)):
        while chunk:
            if not is_open and num_frames and damage is zlib.error:
                padded = len(chunk)
                chunk = chunk.lstrip(b"\0")  # as gzip takes it, behind a member
                offset += padded - len(chunk)
                if not chunk:
                    break
            if not is_open:
                num_frames += 1
                frame = make()
                head = b""
            if len(head) <= len(_ZSTD_MAGIC):
                head += chunk[: len(_ZSTD_MAGIC) + 1 - len(head)]
                if _lacks_checksum(head):
                    on_no_checksum()
            try:
                content = frame.decompress(chunk)
            except damage as error:
                raise DataError(
                    f"{path} is damaged near byte {offset} (after {count} bytes of content): "
                    f"{error}"
                ) from error
            is_open = not frame.eof
            tail = b"" if is_open else frame.unused_data
            offset = offset + len(chunk) - len(tail)
            chunk = tail
            count += len(content)
            if content:
                yield content
    if is_open:
        raise DataError(
            f"{path} ends at byte {offset} in the middle of its compressed content (after {count} "
            "bytes of it): it is truncated, copy it again"
        )


def _lacks_checksum(head: bytes) -> bool:
    """Return whether the first 5 bytes are those of a zstd frame without a checksum."""
    is_zstd = head[:-1] == _ZSTD_MAGIC
    return is_zstd and not head[-1] & _ZSTD_CHECKSUM
