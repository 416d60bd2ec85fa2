# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""A codec for tests of text."""


class Letters:
    """A letter for each token."""

    def encode(self, text):
        return [ord(letter) - ord("a") for letter in text]

    def decode(self, tokens):
        return "".join(chr(ord("a") + int(token)) for token in tokens)
