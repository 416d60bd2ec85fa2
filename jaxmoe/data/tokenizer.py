# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Tokenizers: text to token ids and back, and the token that stands between two documents.

A document is stored as separator, tokens, separator: its first token is predicted from something,
its end is learnt, and the bits of its predictions are those of the whole of it. With `bytes` the
separator is byte 0, which ordinary text does not hold (a text that does is a bad record), so that
the vocabulary is 256. Reading and training of subword vocabularies is the `tokenizers` package's.

A text that spells a special token, such as <|endoftext|>, is text, not that token.

To add a tokenizer: a config here with `build(texts, directory)`, and its place in the union.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
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
from jaxmoe.optional import require
from pallas_kernels.array_types import Int, Shaped

logger = logging.getLogger(__name__)

_SEPARATOR = "<|endoftext|>"
_KNOWN_SEPARATORS = (_SEPARATOR, "<|end_of_text|>", "</s>", "<eos>", "[SEP]", "<|im_end|>", "<s>")
_SMALLEST_TRAINED = 257

Texts = Callable[[], Iterable[str]]
"""The texts of the train split; called only by a tokenizer that is trained."""


@runtime_checkable
class Tokenizer(Protocol):
    """Text to token ids and back."""

    @property
    def vocab_size(self) -> int:
        """Every id is below it."""
        ...

    @property
    def separator(self) -> int | None:
        """The id between two documents; None: there is none, and text cannot be read."""
        ...

    @property
    def is_text(self) -> bool:
        """Tokens stand for text, so that bits per byte mean something."""
        ...

    def encode_all(self, texts: Sequence[str]) -> list[Shaped[np.ndarray, " S"]]:
        """The ids of each text, without separators, as integers of any width."""
        ...

    def decode(self, tokens: Shaped[np.ndarray, " S"]) -> bytes:
        """The text of the ids in UTF-8, without separators."""
        ...

    def fingerprint(self) -> dict[str, Any]:
        """Kind, size and sha256, in values that JSON holds."""
        ...


class _Kind:
    """Properties of a kind of tokenizer that do not need the tokenizer to be built."""

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
        """The tokenizer; nothing is read."""
        del texts, directory
        return ByteTokenizer()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FileConfig(_Kind):
    """A tokenizer.json, as Hugging Face's `tokenizers` writes it."""

    name: ClassVar[str] = "file"

    path: str = ""
    """The tokenizer.json, or a directory that holds one."""
    separator: str | None = None
    """The token between documents; None: the usual end-of-text token of the vocabulary."""

    def build(self, texts: Texts, directory: pathlib.Path) -> SubwordTokenizer:
        """Reads the file.

        Raises:
            DataError: It is not there or no tokenizer, or the separator is not in its vocabulary.
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
    """Ids at most, the 256 bytes and the separator among them; a short text gives fewer."""

    def __post_init__(self):
        if self.vocab_size < _SMALLEST_TRAINED:
            raise ValueError(
                f"data.tokenizer.vocab_size={self.vocab_size} must be at least "
                f"{_SMALLEST_TRAINED}: 256 bytes and the separator"
            )

    def build(self, texts: Texts, directory: pathlib.Path) -> SubwordTokenizer:
        """Trains it, unless the directory holds it already."""
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
            bpe.train_from_iterator(iter(texts()), trainer)
            directory.mkdir(parents=True, exist_ok=True)
            new = path.with_suffix(f".{uuid.uuid4().hex}.new")
            new.write_text(bpe.to_str(), encoding="utf-8")
            os.replace(new, path)
        return SubwordTokenizer(path, _SEPARATOR)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class IdsConfig(_Kind):
    """No text at all: token ids that were made elsewhere, for pre-tokenised files only."""

    name: ClassVar[str] = "ids"
    is_text: ClassVar[bool] = False

    vocab_size: int = 50_257
    """Every id in the files is below it."""
    separator: int | None = None
    """The id that ends a document in a file without document borders; None: one document."""

    def __post_init__(self):
        if self.vocab_size < 2:
            raise ValueError(f"data.tokenizer.vocab_size={self.vocab_size} must be at least 2")
        if self.separator is not None and not 0 <= self.separator < self.vocab_size:
            raise ValueError(
                f"data.tokenizer.separator={self.separator} must be an id below "
                f"vocab_size={self.vocab_size}"
            )

    def build(self, texts: Texts, directory: pathlib.Path) -> IdTokenizer:
        """The tokenizer; nothing is read."""
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
        """The bytes of each text."""
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def decode(self, tokens: Shaped[np.ndarray, " S"]) -> bytes:
        """The bytes that are not separators."""
        tokens = np.asarray(tokens)
        return tokens[tokens != self.separator].astype(np.uint8).tobytes()

    def fingerprint(self) -> dict[str, Any]:
        """There is only one."""
        return {"kind": BytesConfig.name, "vocab_size": self.vocab_size}


class SubwordTokenizer:
    """A vocabulary of the `tokenizers` package, from a file.

    Args:
        path: Of the tokenizer.json.
        separator: The token between documents; None: the usual one.
    """

    is_text = True

    def __init__(self, path: pathlib.Path, separator: str | None):
        try:
            content = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"data.tokenizer.path={path} cannot be read: {error}") from error
        _check_json(path, content)
        library = require("tokenizers")
        with _RustErrors(path):
            self._bpe = library.Tokenizer.from_str(content)
        self._bpe.encode_special_tokens = True
        self._bpe.no_truncation()
        self._bpe.no_padding()
        self.path, self.content = path, content
        self._sha256 = hashlib.sha256(content.encode()).hexdigest()
        vocabulary = self._bpe.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        candidates = _KNOWN_SEPARATORS if separator is None else (separator,)
        found = next((token for token in candidates if token in vocabulary), None)
        if found is None:
            raise DataError(
                f"{path} has no token {' or '.join(candidates)} to stand between documents: name "
                "one of its tokens with --data.tokenizer.separator"
            )
        self.separator_token = found
        self.separator: int | None = vocabulary[found]

    def encode_all(self, texts: Sequence[str]) -> list[Int[np.ndarray, " S"]]:
        """The ids of each text, without special tokens."""
        encodings = self._bpe.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def decode(self, tokens: Shaped[np.ndarray, " S"]) -> bytes:
        """The text; bytes cut off from their character become U+FFFD, unknown ids nothing."""
        tokens = np.asarray(tokens)
        return self._bpe.decode(tokens[tokens != self.separator].tolist()).encode()

    def fingerprint(self) -> dict[str, Any]:
        """The sha256 of the file, and which of its ids separates."""
        return {
            "kind": "subword",
            "vocab_size": self.vocab_size,
            "separator": self.separator,
            "sha256": self._sha256,
        }


@dataclasses.dataclass(frozen=True, slots=True)
class IdTokenizer:
    """Numbers, separated by spaces where they are shown."""

    vocab_size: int
    separator: int | None
    is_text: bool = False

    def encode_all(self, texts: Sequence[str]) -> list[Int[np.ndarray, " S"]]:
        """The numbers that each text spells."""
        return [np.array([*self._numbers(text)], np.int32) for text in texts]

    def decode(self, tokens: Shaped[np.ndarray, " S"]) -> bytes:
        """The numbers."""
        return " ".join(map(str, np.asarray(tokens).tolist())).encode()

    def fingerprint(self) -> dict[str, Any]:
        """Sizes only: what the ids mean is not known."""
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
    """Says what `tokenizers` raises: Exception itself, which no narrower class stands for.

    Args:
        path: Of the file that is read.
    """

    def __init__(self, path: pathlib.Path):
        self._path = path

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        """Turns that, and nothing else, into a DataError."""
        if kind is Exception:
            raise DataError(
                f"data.tokenizer.path={self._path} is no tokenizer that this version of "
                f"`tokenizers` reads: {error}"
            ) from error


def _check_json(path: pathlib.Path, content: str) -> None:
    """Refuses what is no tokenizer.json."""
    try:
        data = json.loads(content)
    except json.JSONDecodeError as error:
        raise DataError(f"data.tokenizer.path={path} is not JSON: {error}") from error
    if not isinstance(data, dict) or not isinstance(data.get("model"), dict):
        raise DataError(
            f"data.tokenizer.path={path} is JSON, but no tokenizer: expected an object with the "
            "key 'model', as tokenizers.Tokenizer.save writes it"
        )
