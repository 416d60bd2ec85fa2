# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Reads the embedded corpus: the source code of the running Python's standard library.

About 10 MB of text, read as bytes (vocabulary 256). Documents are the `.py` files of the modules in
`sys.stdlib_module_names`, without tests, in sorted order, joined by one byte 0, which Python source
does not contain. The sha256 of a file decides its split (one in `VALIDATION_EVERY` is held out), so
that adding a file moves no other and equal files stay together. A row is a window of S + 1 bytes
that starts at the last byte of the row before: every byte but the first is predicted once, except
those after the last whole row. Rows cross document borders.

The text differs slightly between Python versions. The fingerprint holds the sha256 of both splits;
numbers of two runs compare if it is equal. Golden numbers use the synthetic languages.
"""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
import sys
import sysconfig
from typing import Any, ClassVar

import numpy as np

from jaxmoe.data.batch import DataError
from jaxmoe.data.source import Row, Split
from jaxmoe.data.subset import PartitionedConfig, Subset
from jaxmoe.data.tokenizer import BytesConfig, TokenizerConfig
from pallas_kernels.array_types import Int, Shaped

SEPARATOR = 0
"""Byte between two documents."""
VALIDATION_EVERY = 20
"""One in this many files is held out."""
SMALLEST_USEFUL_BYTES = 2_000_000
"""Total size below which the library's source must have been stripped."""
_EXCLUDED = frozenset({"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages"})


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CorpusConfig(PartitionedConfig):
    """The source code of the running Python's standard library, byte level, no download."""

    name: ClassVar[str] = "corpus"
    tokenizer: ClassVar[TokenizerConfig] = BytesConfig()

    def build(self, seed: int = 0) -> Corpus:
        """Read the library, which has no order.

        Raises:
            DataError: The library's source is missing, stripped or unreadable.
        """
        del seed
        partition = None
        documents: dict[Split, list[bytes]] = {"train": [], "validation": []}
        for document in _read_documents():
            digest = hashlib.sha256(document).digest()
            held_out = int.from_bytes(digest[:8], "big") % VALIDATION_EVERY == 0
            documents["validation" if held_out else "train"].append(document)
        if self.partition is not None:
            train = documents["train"]
            partition, numbers = self.partition.of_documents(
                lambda n: np.frombuffer(train[n], np.uint8), len(train)
            )
            documents["train"] = [train[number] for number in numbers]
        joined: dict[Split, bytes] = {
            split: bytes([SEPARATOR]).join(parts) for split, parts in documents.items()
        }
        return Corpus(
            joined={split: np.frombuffer(part, np.uint8) for split, part in joined.items()},
            num_documents={split: len(parts) for split, parts in documents.items()},
            sha256={split: hashlib.sha256(part).hexdigest() for split, part in joined.items()},
            partition=partition,
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """Bytes in two splits, cut into rows."""

    joined: dict[Split, Shaped[np.ndarray, " length"]]
    num_documents: dict[Split, int]
    sha256: dict[Split, str]
    partition: Subset | None = None
    """Part to which the training documents belong, if they are partitioned."""

    @property
    def vocab_size(self) -> int:
        """256: every byte is a token."""
        return 256

    @property
    def bytes_per_token(self) -> float:
        """1: a token is a byte."""
        return 1.0

    def num_rows(self, split: Split, sequence_length: int) -> int:
        """Return the number of whole windows of a split."""
        return max(0, (len(self.joined[split]) - 1) // sequence_length)

    def row(self, split: Split, index: int, sequence_length: int, *, epoch: int = 0) -> Row:
        """Return the window of S + 1 bytes that starts at index * S, the same in every epoch."""
        del epoch
        num_rows = self.num_rows(split, sequence_length)
        if not 0 <= index < num_rows:
            raise DataError(
                f"row {index} is not in the {split} split of the corpus, which has {num_rows} rows "
                f"of sequence_length={sequence_length}"
            )
        start = index * sequence_length
        return Row(self.joined[split][start : start + sequence_length + 1].astype(np.int32))

    def entropy_bits_per_token(self, sequence_length: int) -> None:
        """Return None: the entropy of real text is unknown."""
        del sequence_length

    def fingerprint(self) -> dict[str, Any]:
        """Return the kind, and documents, bytes and sha256 of each split."""
        return {
            "kind": CorpusConfig.name,
            **{
                split: {
                    "documents": self.num_documents[split],
                    "bytes": len(text),
                    "sha256": self.sha256[split],
                }
                for split, text in self.joined.items()
            },
            **({} if self.partition is None else {"partition": self.partition.fingerprint()}),
        }

    def describe(self, sequence_length: int) -> str:
        """Return the number of documents and bytes of both splits together."""
        del sequence_length
        size = sum(len(text) for text in self.joined.values()) / 1e6
        part = "" if self.partition is None else f"{self.partition.describe()}, "
        count = sum(self.num_documents.values())
        return f"corpus: {part}{count} files, {size:.1f} MB, byte level"

    def text(self, split: Split) -> Shaped[np.ndarray, " length"]:
        """Return the bytes of a split."""
        return self.joined[split]

    def encode(self, text: str) -> Int[np.ndarray, " S"]:
        """Return the bytes of a text in UTF-8."""
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)

    def decode(self, tokens: Int[np.ndarray, " S"]) -> str:
        """Return the text of the bytes; invalid UTF-8 becomes U+FFFD, ids above 255 have none."""
        ids = np.asarray(tokens)
        return bytes(ids[ids < 256].tolist()).decode("utf-8", errors="replace")

    def token_bytes(self, token: int, *, is_first: bool = False) -> bytes:
        """Return the byte of an id; ids above 255 have none."""
        del is_first
        return bytes([token] if token < 256 else [])


def _read_documents() -> list[bytes]:
    """Return the non-empty files of the library, in the order of their paths."""
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    relative = (path.relative_to(root) for path in root.rglob("*.py"))
    chosen = sorted(
        path.as_posix()
        for path in relative
        if path.parts[0].removesuffix(".py") in sys.stdlib_module_names
        and _EXCLUDED.isdisjoint(path.parts)
    )
    documents = []
    for path in chosen:
        try:
            documents.append((root / path).read_bytes())
        except OSError as error:
            raise DataError(
                f"the embedded corpus cannot read {root / path} ({error.strerror}): make it "
                "readable, or train on a synthetic language (data:markov)"
            ) from error
    documents = [document for document in documents if document]
    size = sum(len(document) for document in documents)
    if size < SMALLEST_USEFUL_BYTES:
        raise DataError(
            f"the embedded corpus is the source of Python's standard library, and {root} holds "
            f"only {size} bytes of it in {len(documents)} files (at least {SMALLEST_USEFUL_BYTES} "
            "are needed): this distribution strips it. Use a Python from python.org, uv, pyenv or "
            "conda, or train on a synthetic language (data:markov)"
        )
    return documents
