# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Data: sources of rows, and the loader that makes a batch from (seed, global step) alone.

To add a source: its own file (see `source.py`), and its config here in the union.
"""

from jaxmoe.configs import registry_of
from jaxmoe.data.batch import Batch, DataError, validate_batch
from jaxmoe.data.corpus import CorpusConfig
from jaxmoe.data.loader import Loader, check_position, evaluation_batches
from jaxmoe.data.ngram import ngram_bits_per_byte, xz_bits_per_byte
from jaxmoe.data.source import Source, Split
from jaxmoe.data.synthetic import (
    LanguageMixtureConfig,
    MarkovConfig,
    normalized_mutual_information,
)

DataConfig = CorpusConfig | MarkovConfig | LanguageMixtureConfig
DATA_SOURCES = registry_of(DataConfig)

__all__ = [
    "DATA_SOURCES",
    "Batch",
    "CorpusConfig",
    "DataConfig",
    "DataError",
    "LanguageMixtureConfig",
    "Loader",
    "MarkovConfig",
    "Source",
    "Split",
    "check_position",
    "evaluation_batches",
    "ngram_bits_per_byte",
    "normalized_mutual_information",
    "validate_batch",
    "xz_bits_per_byte",
]
