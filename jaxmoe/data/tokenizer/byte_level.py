# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Characters by which byte-level vocabularies write bytes, as GPT-2 chose them."""

from __future__ import annotations


def _characters() -> list[str]:
    """Return the character of each byte: itself if printable, else from U+0100 on."""
    seen = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in seen]
    return [chr(byte if byte in seen else 0x100 + hidden.index(byte)) for byte in range(256)]


CHARACTERS = tuple(_characters())
"""Character of each byte."""
BYTE_OF = {character: byte for byte, character in enumerate(CHARACTERS)}
"""Byte of each character."""
