# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
from jaxmoe.catalog import Registry
from jaxmoe.data.batch import Batch as Batch
from jaxmoe.data.batch import DataError as DataError
from jaxmoe.data.batch import validate_batch as validate_batch
from jaxmoe.data.chat import ChatConfig as ChatConfig
from jaxmoe.data.corpus import CorpusConfig as CorpusConfig
from jaxmoe.data.files import FilesConfig as FilesConfig
from jaxmoe.data.huggingface import HuggingFaceConfig as HuggingFaceConfig
from jaxmoe.data.loader import Loader as Loader
from jaxmoe.data.loader import check_hosts as check_hosts
from jaxmoe.data.loader import check_position as check_position
from jaxmoe.data.loader import evaluation_batches as evaluation_batches
from jaxmoe.data.mixture import Mixture as Mixture
from jaxmoe.data.mixture import MixtureConfig as MixtureConfig
from jaxmoe.data.ngram import ngram_bits_per_byte as ngram_bits_per_byte
from jaxmoe.data.ngram import xz_bits_per_byte as xz_bits_per_byte
from jaxmoe.data.packed import PackedSource as PackedSource
from jaxmoe.data.skipped import SkippedRows as SkippedRows
from jaxmoe.data.source import Row as Row
from jaxmoe.data.source import Source as Source
from jaxmoe.data.source import SourceKind as SourceKind
from jaxmoe.data.source import Split as Split
from jaxmoe.data.synthetic import LanguageMixtureConfig as LanguageMixtureConfig
from jaxmoe.data.synthetic import MarkovConfig as MarkovConfig
from jaxmoe.data.synthetic import normalized_mutual_information as normalized_mutual_information
from jaxmoe.data.text_only import TextOnlyConfig as TextOnlyConfig
from jaxmoe.data.tokenizer import TOKENIZERS as TOKENIZERS
from jaxmoe.data.tokenizer.base import TokenizerConfig as TokenizerConfig

DATA_SOURCES: Registry
