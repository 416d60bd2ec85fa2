# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Provides sources of rows, and the loader that computes a batch from seed and global step.

Text takes the path file -> record (`reading`) -> document (`documents`, the planning pass) -> row
(`packing`) -> batch (`loader`).

To add a source: `jaxmoe/data/source.py` (the interface to implement, in a file of its own),
`jaxmoe/data/__init__.py` (its config in the union), `tests/test_architecture.py` (its name).
"""

from jaxmoe.configs import registry_of
from jaxmoe.data.batch import Batch, DataError, validate_batch
from jaxmoe.data.chat import ChatConfig
from jaxmoe.data.corpus import CorpusConfig
from jaxmoe.data.files import FilesConfig
from jaxmoe.data.hosts import check_hosts
from jaxmoe.data.huggingface import HuggingFaceConfig
from jaxmoe.data.loader import Loader, check_position, evaluation_batches
from jaxmoe.data.mixture import Mixture, MixtureConfig
from jaxmoe.data.ngram import ngram_bits_per_byte, xz_bits_per_byte
from jaxmoe.data.packed import PackedSource
from jaxmoe.data.skipped import SkippedRows
from jaxmoe.data.source import Row, Source, Split
from jaxmoe.data.synthetic import (
    LanguageMixtureConfig,
    MarkovConfig,
    normalized_mutual_information,
)
from jaxmoe.data.text_only import TextOnlyConfig
from jaxmoe.data.tokenizer import TOKENIZERS, TokenizerConfig

DataConfig = (
    CorpusConfig
    | FilesConfig
    | MixtureConfig
    | HuggingFaceConfig
    | ChatConfig
    | MarkovConfig
    | LanguageMixtureConfig
    | TextOnlyConfig
)
DATA_SOURCES = registry_of(DataConfig)

__all__ = [
    "DATA_SOURCES",
    "TOKENIZERS",
    "Batch",
    "ChatConfig",
    "CorpusConfig",
    "DataConfig",
    "DataError",
    "FilesConfig",
    "HuggingFaceConfig",
    "LanguageMixtureConfig",
    "Loader",
    "MarkovConfig",
    "Mixture",
    "MixtureConfig",
    "TextOnlyConfig",
    "PackedSource",
    "Row",
    "SkippedRows",
    "Source",
    "Split",
    "TokenizerConfig",
    "check_hosts",
    "check_position",
    "evaluation_batches",
    "ngram_bits_per_byte",
    "normalized_mutual_information",
    "validate_batch",
    "xz_bits_per_byte",
]
