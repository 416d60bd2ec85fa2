# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Base class of tokenizers, and tokenizers without a vocabulary: bytes, and files of token ids."""

from __future__ import annotations

import abc
import dataclasses
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np

from jaxmoe.data.batch import DataError
from pallas_kernels.array_types import Int, Shaped

MOST_IDS = 2**31
"""Largest vocabulary: token ids are int32."""

Texts = Callable[[], Iterable[str]]
"""Returns the texts of the train split; only tokenizers that are trained call it."""


@runtime_checkable
class Tokenizer(Protocol):
    """Text to token ids and back."""

    @property
    def vocab_size(self) -> int:
        """Number of ids, greater than every id."""
        ...

    @property
    def separator(self) -> int | None:
        """Id between two documents; None: text cannot be read."""
        ...

    @property
    def begin(self) -> int | None:
        """Id that begins a document of text: `separator`, unless the tokenizer has one for that."""
        ...

    @property
    def is_text(self) -> bool:
        """Whether tokens stand for text, so that bits per byte are defined."""
        ...

    @property
    def special_tokens(self) -> Sequence[str]:
        """Texts that `encode_controls` reads as tokens of their own, and `encode_all` as text."""
        ...

    def encode_all(self, texts: Sequence[str]) -> list[Shaped[np.ndarray, " S"]]:
        """Return the ids of each text without separators, of any integer type."""
        ...

    def encode_parts(self, parts: Iterable[str]) -> Iterator[Shaped[np.ndarray, " S"]]:
        """Yield, in order, the ids of one text that comes in parts: those of the whole."""
        ...

    def encode_controls(self, text: str) -> Shaped[np.ndarray, " S"]:
        """Return the ids of a text, in which special tokens that it spells are those tokens."""
        ...

    def encode_prompt(self, text: str) -> Shaped[np.ndarray, " S"]:
        """Return the ids of a prompt, with the special tokens that begin one."""
        ...

    def decode(self, tokens: Shaped[np.ndarray, " S"]) -> bytes:
        """Return the text of ids in UTF-8, without separators."""
        ...

    def spell(self, tokens: Shaped[np.ndarray, " S"]) -> str:
        """Return the text of ids to show, with separators and special tokens."""
        ...

    def token_bytes(self, token: int, *, is_first: bool = False) -> bytes:
        """Return the bytes that a token adds to a text; see `jaxmoe.data.source.token_bytes`."""
        ...

    def fingerprint(self) -> dict[str, Any]:
        """Return kind, size and sha256 as JSON values."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerConfig(abc.ABC):
    """Base class of the configs of tokenizers."""

    name: ClassVar[str]
    """Name in the registry and on the command line."""
    is_text: ClassVar[bool]
    """Whether ids stand for text."""
    is_bytes: ClassVar[bool]
    """Whether every id is a byte."""
    is_trained: ClassVar[bool]
    """Whether building it reads the train split."""

    @abc.abstractmethod
    def build(self, texts: Texts, directory: pathlib.Path) -> Tokenizer:
        """Return the tokenizer.

        Args:
            texts: Texts of the train split, for a tokenizer that is trained.
            directory: Directory of tokenizers that were trained before.

        Raises:
            DataError: Its file is missing or invalid.
        """

    @property
    @abc.abstractmethod
    def file(self) -> pathlib.Path | None:
        """Its tokenizer.json, beside which other files describe it; None where none is named."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BytesConfig(TokenizerConfig):
    """Every byte is a token; vocabulary 256."""

    name: ClassVar[str] = "bytes"
    is_text: ClassVar[bool] = True
    is_bytes: ClassVar[bool] = True
    is_trained: ClassVar[bool] = False

    @property
    def file(self) -> None:
        """None: bytes need no file."""
        return None

    def build(self, texts: Texts, directory: pathlib.Path) -> ByteTokenizer:
        """Return the tokenizer."""
        del texts, directory
        return ByteTokenizer()


@dataclasses.dataclass(frozen=True, slots=True)
class ByteTokenizer:
    """UTF-8 bytes, separated by byte 0."""

    vocab_size: int = 256
    separator: int | None = 0
    is_text: bool = True
    special_tokens: Sequence[str] = ()

    @property
    def begin(self) -> int | None:
        """The separator."""
        return self.separator

    def encode_all(self, texts: Sequence[str]) -> list[Shaped[np.ndarray, " S"]]:
        """Return the bytes of each text."""
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def encode_parts(self, parts: Iterable[str]) -> Iterator[Shaped[np.ndarray, " S"]]:
        """Yield the bytes of each part."""
        for part in parts:
            yield np.frombuffer(part.encode(), np.uint8)

    def encode_controls(self, text: str) -> Shaped[np.ndarray, " S"]:
        """Return the bytes of a text."""
        return self.encode_all([text])[0]

    def encode_prompt(self, text: str) -> Shaped[np.ndarray, " S"]:
        """Return the bytes of a text."""
        return self.encode_all([text])[0]

    def decode(self, tokens: Shaped[np.ndarray, " S"]) -> bytes:
        """Return the bytes that are not separators."""
        tokens = np.asarray(tokens)
        return tokens[tokens != self.separator].astype(np.uint8).tobytes()

    def spell(self, tokens: Shaped[np.ndarray, " S"]) -> str:
        """Return the bytes as text, with `|` for separators; invalid UTF-8 becomes U+FFFD."""
        tokens = np.where(np.asarray(tokens) == self.separator, ord("|"), tokens)
        return tokens.astype(np.uint8).tobytes().decode(errors="replace")

    def token_bytes(self, token: int, *, is_first: bool = False) -> bytes:
        """Return the byte; the separator has none."""
        del is_first
        return b"" if token == self.separator else bytes([token])

    def fingerprint(self) -> dict[str, Any]:
        """Return kind and size."""
        return {"kind": BytesConfig.name, "vocab_size": self.vocab_size}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class IdsConfig(TokenizerConfig):
    """No text: pre-tokenised files of token ids."""

    name: ClassVar[str] = "ids"
    is_text: ClassVar[bool] = False
    is_bytes: ClassVar[bool] = False
    is_trained: ClassVar[bool] = False

    vocab_size: int = 50_257
    """Number of ids, greater than every id in the files."""
    separator: int | None = None
    """Id that ends a document in files without borders; None: each file is one document."""

    def __post_init__(self):
        if self.vocab_size < 2:
            raise ValueError(f"data.tokenizer.vocab_size={self.vocab_size} must be at least 2")
        if self.vocab_size > MOST_IDS:
            raise ValueError(
                f"data.tokenizer.vocab_size={self.vocab_size} must be at most {MOST_IDS}, because "
                "token ids are int32: give the number of ids of the tokenizer that made the files"
            )
        if self.separator is not None and not 0 <= self.separator < self.vocab_size:
            raise ValueError(
                f"data.tokenizer.separator={self.separator} must be an id below "
                f"vocab_size={self.vocab_size}"
            )

    @property
    def file(self) -> None:
        """None: the tokenizer that made the ids is not named."""
        return None

    def build(self, texts: Texts, directory: pathlib.Path) -> IdTokenizer:
        """Return the tokenizer."""
        del texts, directory
        return IdTokenizer(self.vocab_size, self.separator)


@dataclasses.dataclass(frozen=True, slots=True)
class IdTokenizer:
    """Token ids; their text is numbers separated by spaces."""

    vocab_size: int
    separator: int | None
    is_text: bool = False
    special_tokens: Sequence[str] = ()

    @property
    def begin(self) -> int | None:
        """The separator."""
        return self.separator

    def encode_all(self, texts: Sequence[str]) -> list[Int[np.ndarray, " S"]]:
        """Return the numbers in each text."""
        return [np.array([*self._numbers(text)], np.int32) for text in texts]

    def encode_parts(self, parts: Iterable[str]) -> Iterator[Int[np.ndarray, " S"]]:
        """Yield the numbers in a text that comes in parts, which are joined."""
        yield from self.encode_all(["".join(parts)])

    def encode_controls(self, text: str) -> Int[np.ndarray, " S"]:
        """Return the numbers in a text."""
        return self.encode_all([text])[0]

    def encode_prompt(self, text: str) -> Int[np.ndarray, " S"]:
        """Return the numbers in a text."""
        return self.encode_all([text])[0]

    def decode(self, tokens: Shaped[np.ndarray, " S"]) -> bytes:
        """Return the numbers as text."""
        return " ".join(map(str, np.asarray(tokens).tolist())).encode()

    def spell(self, tokens: Shaped[np.ndarray, " S"]) -> str:
        """Return the numbers as text."""
        return self.decode(tokens).decode()

    def token_bytes(self, token: int, *, is_first: bool = False) -> bytes:
        """Return the number, after a space where it is not the first."""
        return f"{'' if is_first else ' '}{token}".encode()

    def fingerprint(self) -> dict[str, Any]:
        """Return kind, size and separator."""
        return {"kind": IdsConfig.name, "vocab_size": self.vocab_size, "separator": self.separator}

    def _numbers(self, text: str) -> Iterator[int]:
        for word in text.split():
            if not word.isdecimal() or int(word) >= self.vocab_size:
                raise DataError(
                    f"{word!r} is not a token id: write numbers from 0 to {self.vocab_size - 1}, "
                    "separated by spaces, or give the tokenizer that made the files "
                    "(data.tokenizer:file)"
                )
            yield int(word)
