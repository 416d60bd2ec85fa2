# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Provides the text of a source without its rows: for runs whose data has moved, and models that
were imported without any.

Encodes prompts and decodes tokens as the source of the documents does, or, for imported models, as
`transformers` does; reading a row is an error.
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any, ClassVar, NoReturn

import numpy as np

from jaxmoe import combinations
from jaxmoe.data import tokenizer as tokenizers
from jaxmoe.data.batch import DataError
from jaxmoe.data.source import SourceKind, SourceTraits, Split, TemplateName
from jaxmoe.data.tokenizer import BytesConfig, Tokenizer, TokenizerConfig
from pallas_kernels.array_types import Int


def encode_document(tokenizer: Tokenizer, text: str) -> Int[np.ndarray, " S"]:
    """Return the ids of a text, after the id that begins every document: mostly the separator.

    Args:
        tokenizer: Tokenizer of the documents; numbers that are ids get none.
        text: Text to encode.
    """
    ids = tokenizer.encode_all([text])[0].astype(np.int32)
    if not tokenizer.is_text:
        return ids
    return np.concatenate([np.array([tokenizer.begin], np.int32), ids])


class TokenizerText:
    """Base class of sources with a tokenizer: texts of tokens."""

    __slots__ = ()

    tokenizer: Tokenizer

    def decode(self, tokens: Int[np.ndarray, " S"]) -> str:
        """Return the text of the tokens; invalid UTF-8 becomes U+FFFD."""
        return self.tokenizer.decode(np.asarray(tokens)).decode("utf-8", errors="replace")

    def token_bytes(self, token: int, *, is_first: bool = False) -> bytes:
        """Return the bytes that a token adds to a text; see `jaxmoe.data.source.token_bytes`."""
        return self.tokenizer.token_bytes(token, is_first=is_first)


@dataclasses.dataclass(frozen=True, slots=True)
class TextOnly(TokenizerText):
    """A tokenizer in the place of a source of documents."""

    tokenizer: Tokenizer
    is_imported: bool = False
    """Whether prompts have the ids that `transformers` gives them: special tokens that they spell
    are recognised, and those of the tokenizer's post-processor are added."""

    @property
    def vocab_size(self) -> int:
        """Vocabulary of the tokenizer."""
        return self.tokenizer.vocab_size

    @property
    def bytes_per_token(self) -> None:
        """None: there is no text to count."""
        return None

    def num_rows(self, split: Split, sequence_length: int) -> None:
        """Return None: there are no rows to count."""
        del split, sequence_length

    def row(self, split: Split, index: int, sequence_length: int, *, epoch: int = 0) -> NoReturn:
        """Raise a DataError."""
        del index, sequence_length, epoch
        raise DataError(f"the run was opened without its data: there is no {split} row to read")

    def entropy_bits_per_token(self, sequence_length: int) -> None:
        """Return None: there is no text."""
        del sequence_length

    def fingerprint(self) -> dict[str, Any]:
        """Return the tokenizer's fingerprint."""
        return {"kind": "text_only", "tokenizer": self.tokenizer.fingerprint()}

    def describe(self, sequence_length: int) -> str:
        """Return the tokenizer in one line."""
        del sequence_length
        return f"{self.fingerprint()['tokenizer']['kind']} tokenizer of {self.vocab_size:,} ids"

    def text(self, split: Split) -> None:
        """Return None: there is no text."""
        del split

    def encode(self, text: str) -> Int[np.ndarray, " S"]:
        """Return the ids of a prompt; of a run, after the id that begins every document."""
        if self.is_imported:
            return self.tokenizer.encode_prompt(text).astype(np.int32)
        return encode_document(self.tokenizer, text)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TextOnlyConfig(SourceKind):
    """No rows, only a tokenizer: for models that generate and are not trained."""

    name: ClassVar[str] = "tokenizer_only"
    takes_tokenizer: ClassVar[bool] = True

    tokenizer: TokenizerConfig = BytesConfig()
    """Tokenizer of prompts and text."""
    template: TemplateName | None = None
    """How conversations are written, where no file beside the tokenizer says it."""

    @property
    def traits(self) -> SourceTraits:
        """Properties that the rest of the library depends on."""
        return SourceTraits(has_rows=False, template=self.template)

    def __post_init__(self):
        combinations.check(data=self)

    def with_tokenizer(self, path: pathlib.Path) -> TextOnlyConfig:
        """Return the config with a copy of its tokenizer.json, if it has one."""
        return dataclasses.replace(self, tokenizer=copy_config(self.tokenizer, path))

    def build(self, seed: int = 0) -> TextOnly:
        """Read the tokenizer; there are no rows to order.

        Raises:
            DataError: The tokenizer cannot be read.
        """
        del seed
        tokenizer = self.tokenizer.build(lambda: (), pathlib.Path())
        # Bytes with a template were trained here, and their documents begin with the separator.
        is_own_export = self.tokenizer.is_bytes and self.template is not None
        return TextOnly(tokenizer, is_imported=not is_own_export)


def build_text(data: SourceKind, seed: int = 0) -> Any:
    """Return a source that encodes and decodes; it reads data only to train a tokenizer.

    Args:
        data: Config of the source.
        seed: Seed of the order of rows.

    Raises:
        DataError: The tokenizer cannot be read, or the data that it is trained on.
    """
    if not data.traits.has_rows or not data.takes_tokenizer:
        return data.build(seed)
    assert data.tokenizer is not None  # it is a field
    if data.tokenizer.is_trained:
        return data.build(seed)
    return TextOnly(data.tokenizer.build(lambda: (), pathlib.Path()))


def copy_config(tokenizer: TokenizerConfig, path: pathlib.Path) -> TokenizerConfig:
    """Return the config of a copy of a tokenizer.json; the config itself without such a file.

    Args:
        tokenizer: Config of the tokenizer.
        path: Path of the copy.
    """
    if not tokenizer.is_text or tokenizer.is_bytes:
        return tokenizer
    separator, begin = (getattr(tokenizer, field, None) for field in ("separator", "begin"))
    return tokenizers.FileConfig(path=str(path), separator=separator, begin=begin)
