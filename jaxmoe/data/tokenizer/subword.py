# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Subword tokenizers of the `tokenizers` package: of a tokenizer.json, or trained here."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from jaxmoe.data.batch import DataError
from jaxmoe.data.tokenizer.base import MOST_IDS, Texts, TokenizerConfig
from jaxmoe.data.tokenizer.byte_level import BYTE_OF
from jaxmoe.data.tokenizer.cutting import announced_pieces
from jaxmoe.data.tokenizer.encoding import Kind, encode_parts, encode_pieces, kind_of
from jaxmoe.disk import kind_of_special_file
from jaxmoe.json_bounds import parse_json
from jaxmoe.messages import say
from jaxmoe.optional import require
from pallas_kernels.array_types import Int, Shaped

SEPARATOR = "<|endoftext|>"
"""Separator of vocabularies that are trained here."""
_KNOWN_SEPARATORS = (SEPARATOR, "<|end_of_text|>", "</s>", "<eos>", "[SEP]", "<|im_end|>", "<s>")
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""Token of a byte in vocabularies that fall back to bytes."""
_SMALLEST_TRAINED = 257
_MAX_JSON_VALUES = 1 << 24  # an object or a list for each merge


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FileConfig(TokenizerConfig):
    """A tokenizer.json, as Hugging Face's `tokenizers` writes it."""

    name: ClassVar[str] = "file"
    is_text: ClassVar[bool] = True
    is_bytes: ClassVar[bool] = False
    is_trained: ClassVar[bool] = False

    path: str = ""
    """A tokenizer.json file, or a directory with one."""
    separator: str | None = None
    """Token between documents; the usual end-of-text token of the vocabulary when None."""
    begin: str | None = None
    """Token that begins a document; the separator when None."""

    def build(self, texts: Texts, directory: pathlib.Path) -> SubwordTokenizer:
        """Read the file.

        Raises:
            DataError: The file is missing or invalid, or a token is not in the vocabulary.
        """
        del texts, directory
        if (file := self.file) is None:
            raise DataError("data.tokenizer.path is empty: give the path of a tokenizer.json")
        return SubwordTokenizer(file, self.separator, self.begin)

    @property
    def file(self) -> pathlib.Path | None:
        """Its tokenizer.json, beside which other files describe it; None where none is named."""
        if not self.path:
            return None
        path = pathlib.Path(self.path).expanduser()
        return path / "tokenizer.json" if path.is_dir() else path


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TrainedConfig(TokenizerConfig):
    """A byte-level BPE vocabulary, trained here on the train split and kept in the cache."""

    name: ClassVar[str] = "trained"
    is_text: ClassVar[bool] = True
    is_bytes: ClassVar[bool] = False
    is_trained: ClassVar[bool] = True

    vocab_size: int = 4096
    """Largest number of ids, including 256 bytes and the separator; a short text gives fewer."""

    def __post_init__(self):
        if self.vocab_size < _SMALLEST_TRAINED:
            raise ValueError(
                f"data.tokenizer.vocab_size={self.vocab_size} must be at least "
                f"{_SMALLEST_TRAINED}: 256 bytes and the separator"
            )

    @property
    def file(self) -> None:
        """None: it is in the cache once it is trained."""
        return None

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


class SubwordTokenizer:
    """Tokenizer of the `tokenizers` package, from a file.

    Args:
        path: Path of the tokenizer.json.
        separator: Token between documents; the usual end-of-text token when None.
        begin: Token that begins a document; the separator when None.
    """

    is_text = True

    def __init__(self, path: pathlib.Path, separator: str | None, begin: str | None = None):
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
        self.path = path
        self.content = content
        self._sha256 = hashlib.sha256(content.encode()).hexdigest()
        vocabulary = self._bpe.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        if not 0 < self.vocab_size <= MOST_IDS:
            raise DataError(
                f"data.tokenizer.path={path} has {len(vocabulary)} tokens and ids below "
                f"{self.vocab_size}: expected 1 to {MOST_IDS} ids, because token ids are int32. "
                "Give another file"
            )
        self._kind: Kind = kind_of(data)
        self._decoders = frozenset(_types(data.get("decoder")))
        candidates = _KNOWN_SEPARATORS if separator is None else (separator,)
        end_token = next((token for token in candidates if token in vocabulary), None)
        if end_token is None:
            raise DataError(
                f"{path} has no token {' or '.join(candidates)} to separate documents: name "
                "one of its tokens with --data.tokenizer.separator"
            )
        self.separator_token = end_token
        self.separator: int | None = vocabulary[end_token]
        if begin is not None and begin not in vocabulary:
            raise DataError(
                f"{path} has no token {begin!r} to begin documents: name one of its tokens with"
                " --data.tokenizer.begin, or leave it out for the separator"
            )
        self.begin_token = end_token if begin is None else begin
        self.begin: int | None = vocabulary[self.begin_token]

    def encode_all(self, texts: Sequence[str]) -> list[Int[np.ndarray, " S"]]:
        """Return the ids of each text, without special tokens."""
        return encode_pieces(self._kind, texts, self._encodings, self._encode)

    def encode_parts(self, parts: Iterable[str]) -> Iterator[Int[np.ndarray, " S"]]:
        """Yield, in order, the ids of one text that comes in parts: those of the whole."""
        return encode_parts(self._kind, parts, self._encodings, self._encode)

    def encode_prompt(self, text: str) -> Int[np.ndarray, " S"]:
        """Return the ids of a prompt as `transformers` does: special tokens that the text spells
        are recognised, and those of the post-processor are added."""
        with _RustErrors(self.path):
            return np.array(self._with_controls.encode(text).ids, np.int32)

    def encode_controls(self, text: str) -> Int[np.ndarray, " S"]:
        """Return the ids of a text, in which special tokens that it spells are those tokens."""
        with _RustErrors(self.path):
            encoding = self._with_controls.encode(text, add_special_tokens=False)
        return np.array(encoding.ids, np.int32)

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """Texts that `encode_controls` reads as tokens of their own, and `encode_all` as text."""
        added = self._bpe.get_added_tokens_decoder().values()
        return tuple(token.content for token in added if token.special)

    @functools.cached_property
    def _with_controls(self) -> Any:
        """The tokenizer of the file, which recognises special tokens in a text."""
        library = require("tokenizers")
        with _RustErrors(self.path):
            bpe = library.Tokenizer.from_str(self.content)
            bpe.no_truncation()
            bpe.no_padding()
        return bpe

    def decode(self, tokens: Shaped[np.ndarray, " S"]) -> bytes:
        """Return the text; incomplete characters become U+FFFD, unknown ids are dropped."""
        tokens = np.asarray(tokens)
        return self._bpe.decode(tokens[tokens != self.separator].tolist()).encode()

    def spell(self, tokens: Shaped[np.ndarray, " S"]) -> str:
        """Return the text of ids to show, with separators and special tokens."""
        return self._bpe.decode(np.asarray(tokens).tolist(), skip_special_tokens=False)

    def token_bytes(self, token: int, *, is_first: bool = False) -> bytes:
        """Return the bytes that a token adds to a text; see `jaxmoe.data.source.token_bytes`.

        A token that is a part of a character has its own bytes.
        """
        alone = self.decode(np.array([token]))
        name = self._bpe.id_to_token(token)
        if name is None or token in self._silent:
            return b""
        if "ByteLevel" in self._decoders and token not in self._added_tokens:
            byte_values = [BYTE_OF.get(character) for character in name]
            if None not in byte_values:
                return bytes(byte for byte in byte_values if byte is not None)
        if "ByteFallback" in self._decoders and (match := _BYTE.fullmatch(name)):
            return bytes([int(match[1], 16)])
        if is_first:
            return alone
        anchor, text = self._anchor
        behind = self.decode(np.array([*anchor, token])).decode()
        return behind[len(text) :].encode() if behind.startswith(text) else alone

    @functools.cached_property
    def _added_tokens(self) -> Mapping[int, Any]:
        """Tokens beside the vocabulary, which are text as they stand, by id."""
        return self._bpe.get_added_tokens_decoder()

    @functools.cached_property
    def _silent(self) -> frozenset[int | None]:
        """Ids that decode to nothing."""
        return frozenset(
            {self.separator, *(i for i, token in self._added_tokens.items() if token.special)}
        )

    @functools.cached_property
    def _anchor(self) -> tuple[list[int], str]:
        """Ids that a token is decoded behind, and their text."""
        ids = self.encode_all(["a"])[0][-1:]
        return ids.tolist(), self.decode(ids).decode()

    def _encode(self, texts: Sequence[str]) -> list[Int[np.ndarray, " S"]]:
        with _RustErrors(self.path):
            encodings = self._bpe.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def _encodings(self, texts: Sequence[str]) -> list[Any]:
        with _RustErrors(self.path):
            return self._bpe.encode_batch(list(texts), add_special_tokens=False)

    def fingerprint(self) -> dict[str, Any]:
        """Return size, separator and the sha256 of the file; where it is another, the begin."""
        return {
            "kind": "subword",
            "vocab_size": self.vocab_size,
            "separator": self.separator,
            **({} if self.begin == self.separator else {"begin": self.begin}),
            "sha256": self._sha256,
        }


def _types(decoder: Any) -> list[str]:
    """Return the types of the decoders of a tokenizer.json, those of a sequence included."""
    if not isinstance(decoder, dict):
        return []
    nested = [_types(kind) for kind in decoder.get("decoders") or ()]
    return [str(decoder.get("type")), *(kind for kinds in nested for kind in kinds)]


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
