# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Converts text to token ids and back, and defines the separator between documents.

A document is stored as separator, tokens, separator: its first token has a context, its end is
learned, and its predictions cover the whole text. With `bytes` the separator is byte 0, which
ordinary text does not contain (a text that does is a bad record), so that the vocabulary is 256.
The `tokenizers` package reads and trains subword vocabularies.

Text that spells a special token, such as <|endoftext|>, is encoded as text, not as that token.

To add a tokenizer: `jaxmoe/data/tokenizer/__init__.py` (a config with `name` and `build`, a place
in the union), `tests/test_architecture.py` (its name).
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np

from jaxmoe.configs import registry_of
from jaxmoe.data.batch import DataError
from jaxmoe.data.tokenizer.cutting import announced_pieces
from jaxmoe.data.tokenizer.subword import MOST_IDS, SEPARATOR
from jaxmoe.data.tokenizer.subword import SubwordTokenizer as SubwordTokenizer
from jaxmoe.messages import say
from jaxmoe.optional import require
from pallas_kernels.array_types import Int, Shaped

_SMALLEST_TRAINED = 257

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


class _Kind:
    """Properties of a tokenizer that are known before it is built, and their defaults."""

    __slots__ = ()

    is_text: ClassVar[bool] = True
    """Whether ids stand for text."""
    is_bytes: ClassVar[bool] = False
    """Whether every id is a byte."""
    is_trained: ClassVar[bool] = False
    """Whether building it reads the train split."""

    @property
    def directory(self) -> pathlib.Path | None:
        """Directory of its file, in which other files describe it; None without a file."""
        return None

    def moved(self, before: pathlib.Path, after: pathlib.Path) -> Any:
        """Return the config with `after` in the place of the file `before`, if it names that."""
        del before, after
        return self


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BytesConfig(_Kind):
    """Every byte is a token; vocabulary 256."""

    name: ClassVar[str] = "bytes"
    is_bytes: ClassVar[bool] = True

    def build(self, texts: Texts, directory: pathlib.Path) -> ByteTokenizer:
        """Return the tokenizer."""
        del texts, directory
        return ByteTokenizer()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FileConfig(_Kind):
    """A tokenizer.json, as Hugging Face's `tokenizers` writes it."""

    name: ClassVar[str] = "file"

    path: str = ""
    """A tokenizer.json file, or a directory with one."""
    separator: str | None = None
    """Token between documents; the usual end-of-text token of the vocabulary when None."""

    def build(self, texts: Texts, directory: pathlib.Path) -> SubwordTokenizer:
        """Read the file.

        Raises:
            DataError: The file is missing or invalid, or the separator is not in the vocabulary.
        """
        del texts, directory
        if not self.path:
            raise DataError("data.tokenizer.path is empty: give the path of a tokenizer.json")
        path = pathlib.Path(self.path).expanduser()
        return SubwordTokenizer(path / "tokenizer.json" if path.is_dir() else path, self.separator)

    @property
    def directory(self) -> pathlib.Path | None:
        """Directory of its file, in which other files describe it; None without a file."""
        if not self.path:
            return None
        path = pathlib.Path(self.path).expanduser()
        return path if path.is_dir() else path.parent

    def moved(self, before: pathlib.Path, after: pathlib.Path) -> FileConfig:
        """Return the config with `after` in the place of the file `before`, if it names that."""
        if pathlib.Path(self.path) != before:
            return self
        return dataclasses.replace(self, path=str(after))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TrainedConfig(_Kind):
    """A byte-level BPE vocabulary, trained here on the train split and kept in the cache."""

    name: ClassVar[str] = "trained"
    is_trained: ClassVar[bool] = True

    vocab_size: int = 4096
    """Largest number of ids, including 256 bytes and the separator; a short text gives fewer."""

    def __post_init__(self):
        if self.vocab_size < _SMALLEST_TRAINED:
            raise ValueError(
                f"data.tokenizer.vocab_size={self.vocab_size} must be at least "
                f"{_SMALLEST_TRAINED}: 256 bytes and the separator"
            )

    def build(self, texts: Texts, directory: pathlib.Path) -> SubwordTokenizer:
        """Train the tokenizer, unless the directory contains it."""
        path = directory / f"bpe-{self.vocab_size}.json"
        if not path.exists():
            library = require("tokenizers")
            bpe = library.Tokenizer(library.models.BPE())
            bpe.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
            bpe.decoder = library.decoders.ByteLevel()
            trainer = library.trainers.BpeTrainer(
                vocab_size=self.vocab_size,
                special_tokens=[SEPARATOR],
                initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
                show_progress=False,
            )
            say(f"training a tokenizer of {self.vocab_size} tokens ...")
            # `tokenizers` buffers 256 texts, and needs about 100 bytes of memory for each byte.
            bpe.train_from_iterator(announced_pieces(texts()), trainer)
            directory.mkdir(parents=True, exist_ok=True)
            new = path.with_suffix(f".{uuid.uuid4().hex}.new")
            new.write_text(bpe.to_str(), encoding="utf-8")
            os.replace(new, path)
        return SubwordTokenizer(path, SEPARATOR)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class IdsConfig(_Kind):
    """No text: pre-tokenised files of token ids."""

    name: ClassVar[str] = "ids"
    is_text: ClassVar[bool] = False

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

    def build(self, texts: Texts, directory: pathlib.Path) -> IdTokenizer:
        """Return the tokenizer."""
        del texts, directory
        return IdTokenizer(self.vocab_size, self.separator)


TokenizerConfig = BytesConfig | FileConfig | TrainedConfig | IdsConfig
TOKENIZERS = registry_of(TokenizerConfig)


@dataclasses.dataclass(frozen=True, slots=True)
class ByteTokenizer:
    """UTF-8 bytes, separated by byte 0."""

    vocab_size: int = 256
    separator: int | None = 0
    is_text: bool = True
    special_tokens: Sequence[str] = ()

    def encode_all(self, texts: Sequence[str]) -> list[Shaped[np.ndarray, " S"]]:
        """Return the bytes of each text."""
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

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


@dataclasses.dataclass(frozen=True, slots=True)
class IdTokenizer:
    """Token ids; their text is numbers separated by spaces."""

    vocab_size: int
    separator: int | None
    is_text: bool = False
    special_tokens: Sequence[str] = ()

    def encode_all(self, texts: Sequence[str]) -> list[Int[np.ndarray, " S"]]:
        """Return the numbers in each text."""
        return [np.array([*self._numbers(text)], np.int32) for text in texts]

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
