# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Converts text to token ids and back, and defines the separator between documents.

A document is stored as separator, tokens, separator: its first token has a context, its end is
learned, and its predictions cover the whole text. With `bytes` the separator is byte 0, which
ordinary text does not contain (a text that does is a bad record), so that the vocabulary is 256.
The `tokenizers` package reads and trains subword vocabularies.

Text that spells a special token, such as <|endoftext|>, is encoded as text, not as that token.

To add a tokenizer: `jaxmoe/data/tokenizer.py` (a config with `name` and `build`, a place in the
union), `tests/test_architecture.py` (its name).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import logging
import os
import pathlib
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np

from jaxmoe.configs import registry_of
from jaxmoe.data.batch import DataError
from jaxmoe.data.pieces import announced_pieces, cuts_at_spaces, pieces
from jaxmoe.disk import kind_of_special_file
from jaxmoe.json_bounds import parse_json
from jaxmoe.messages import say
from jaxmoe.optional import require
from pallas_kernels.array_types import Int, Shaped

logger = logging.getLogger(__name__)

_SEPARATOR = "<|endoftext|>"
_KNOWN_SEPARATORS = (_SEPARATOR, "<|end_of_text|>", "</s>", "<eos>", "[SEP]", "<|im_end|>", "<s>")
_SMALLEST_TRAINED = 257
_PIECES_AT_ONCE = 64
_MOST_IDS = 2**31
_MAX_JSON_VALUES = 1 << 24  # an object or a list for each merge
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
    def is_text(self) -> bool:
        """Whether tokens stand for text, so that bits per byte are defined."""
        ...

    def encode_all(self, texts: Sequence[str]) -> list[Shaped[np.ndarray, " S"]]:
        """Return the ids of each text without separators, of any integer type."""
        ...

    def decode(self, tokens: Shaped[np.ndarray, " S"]) -> bytes:
        """Return the text of ids in UTF-8, without separators."""
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
                special_tokens=[_SEPARATOR],
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
        return SubwordTokenizer(path, _SEPARATOR)


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
        if self.vocab_size > _MOST_IDS:
            raise ValueError(
                f"data.tokenizer.vocab_size={self.vocab_size} must be at most {_MOST_IDS}, because "
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

    def encode_all(self, texts: Sequence[str]) -> list[Shaped[np.ndarray, " S"]]:
        """Return the bytes of each text."""
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def decode(self, tokens: Shaped[np.ndarray, " S"]) -> bytes:
        """Return the bytes that are not separators."""
        tokens = np.asarray(tokens)
        return tokens[tokens != self.separator].astype(np.uint8).tobytes()

    def fingerprint(self) -> dict[str, Any]:
        """Return kind and size."""
        return {"kind": BytesConfig.name, "vocab_size": self.vocab_size}


class SubwordTokenizer:
    """Tokenizer of the `tokenizers` package, from a file.

    Args:
        path: Path of the tokenizer.json.
        separator: Token between documents; the usual end-of-text token when None.
    """

    is_text = True

    def __init__(self, path: pathlib.Path, separator: str | None):
        try:
            if (kind := kind_of_special_file(path)) is not None:
                raise DataError(
                    f"data.tokenizer.path={path} is {kind}: expected a regular file. Give the path "
                    "of a tokenizer.json"
                )
            content = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"data.tokenizer.path={path} cannot be read: {error}") from error
        data = _read_json(path, content)
        library = require("tokenizers")
        with _RustErrors(path):
            self._bpe = library.Tokenizer.from_str(content)
        self._bpe.encode_special_tokens = True
        self._bpe.no_truncation()
        self._bpe.no_padding()
        self.path, self.content = path, content
        self._sha256 = hashlib.sha256(content.encode()).hexdigest()
        vocabulary = self._bpe.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        if not 0 < self.vocab_size <= _MOST_IDS:
            raise DataError(
                f"data.tokenizer.path={path} has {len(vocabulary)} tokens and ids below "
                f"{self.vocab_size}: expected 1 to {_MOST_IDS} ids, because token ids are int32. "
                "Give another file"
            )
        self._cuts_at_spaces = cuts_at_spaces(data)
        candidates = _KNOWN_SEPARATORS if separator is None else (separator,)
        found = next((token for token in candidates if token in vocabulary), None)
        if found is None:
            raise DataError(
                f"{path} has no token {' or '.join(candidates)} to separate documents: name "
                "one of its tokens with --data.tokenizer.separator"
            )
        self.separator_token = found
        self.separator: int | None = vocabulary[found]

    def encode_all(self, texts: Sequence[str]) -> list[Int[np.ndarray, " S"]]:
        """Return the ids of each text, without special tokens."""
        if not self._cuts_at_spaces:
            return self._encode(texts)
        ids: list[list[np.ndarray]] = [[] for _ in texts]
        numbered = ((number, part) for number, text in enumerate(texts) for part in pieces(text))
        while group := list(itertools.islice(numbered, _PIECES_AT_ONCE)):
            for (number, _), part in zip(group, self._encode([p for _, p in group]), strict=True):
                ids[number].append(part)
        return [np.concatenate(parts) for parts in ids]

    def decode(self, tokens: Shaped[np.ndarray, " S"]) -> bytes:
        """Return the text; incomplete characters become U+FFFD, unknown ids are dropped."""
        tokens = np.asarray(tokens)
        return self._bpe.decode(tokens[tokens != self.separator].tolist()).encode()

    def _encode(self, texts: Sequence[str]) -> list[Int[np.ndarray, " S"]]:
        with _RustErrors(self.path):
            encodings = self._bpe.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def fingerprint(self) -> dict[str, Any]:
        """Return size, separator and the sha256 of the file."""
        return {
            "kind": "subword",
            "vocab_size": self.vocab_size,
            "separator": self.separator,
            "sha256": self._sha256,
        }


@dataclasses.dataclass(frozen=True, slots=True)
class IdTokenizer:
    """Token ids; their text is numbers separated by spaces."""

    vocab_size: int
    separator: int | None
    is_text: bool = False

    def encode_all(self, texts: Sequence[str]) -> list[Int[np.ndarray, " S"]]:
        """Return the numbers in each text."""
        return [np.array([*self._numbers(text)], np.int32) for text in texts]

    def decode(self, tokens: Shaped[np.ndarray, " S"]) -> bytes:
        """Return the numbers as text."""
        return " ".join(map(str, np.asarray(tokens).tolist())).encode()

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


class _RustErrors(contextlib.AbstractContextManager[None]):
    """Turns errors of `tokenizers`, which raises plain `Exception`, into a DataError.

    Args:
        path: File that is read, for messages.
    """

    def __init__(self, path: pathlib.Path):
        self._path = path

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        """Raise a DataError for a plain Exception; others pass unchanged."""
        if kind is Exception:
            raise DataError(
                f"data.tokenizer.path={self._path} is not a tokenizer that this version of "
                f"`tokenizers` reads: {error}"
            ) from error


def _read_json(path: pathlib.Path, content: str) -> dict[str, Any]:
    """Return the object in a tokenizer.json; raise a DataError for other content."""
    try:
        data = parse_json(content, max_values=_MAX_JSON_VALUES)
    except json.JSONDecodeError as error:
        raise DataError(f"data.tokenizer.path={path} is not JSON: {error}") from error
    except ValueError as error:  # also an integer of thousands of digits
        raise DataError(
            f"data.tokenizer.path={path} is JSON that is not read ({error}): expected a "
            "tokenizer, as tokenizers.Tokenizer.save writes it"
        ) from error
    if not isinstance(data, dict) or not isinstance(data.get("model"), dict):
        raise DataError(
            f"data.tokenizer.path={path} is JSON, but not a tokenizer: expected an object with the "
            "key 'model', as tokenizers.Tokenizer.save writes it"
        )
    return data
