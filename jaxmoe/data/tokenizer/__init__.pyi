# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
from jaxmoe.catalog import Registry
from jaxmoe.data.tokenizer.base import BytesConfig as BytesConfig
from jaxmoe.data.tokenizer.base import ByteTokenizer as ByteTokenizer
from jaxmoe.data.tokenizer.base import IdsConfig as IdsConfig
from jaxmoe.data.tokenizer.base import IdTokenizer as IdTokenizer
from jaxmoe.data.tokenizer.base import Tokenizer as Tokenizer
from jaxmoe.data.tokenizer.base import TokenizerConfig as TokenizerConfig
from jaxmoe.data.tokenizer.subword import FileConfig as FileConfig
from jaxmoe.data.tokenizer.subword import SubwordTokenizer as SubwordTokenizer
from jaxmoe.data.tokenizer.subword import TrainedConfig as TrainedConfig

TOKENIZERS: Registry
