# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Codecs for tests of text."""


class Letters:
    """A letter for each token."""

    def encode(self, text):
        return [ord(letter) - ord("a") for letter in text]

    def decode(self, tokens):
        return "".join(chr(ord("a") + int(token)) for token in tokens)


class CountedBytes:
    """A byte for each token, marks without text from 256 on; counts what is decoded."""

    def __init__(self):
        self.num_calls = self.num_tokens = 0

    def encode(self, text):
        return list(text.encode())

    def decode(self, tokens):
        self.num_calls += 1
        self.num_tokens += len(tokens)
        return bytes(int(token) for token in tokens if token < 256).decode("utf-8", "replace")

    def token_bytes(self, token, *, is_first=False):
        return bytes([token]) if token < 256 else b""
