# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Converts text to token ids and back, and defines the separator between documents.

A document is stored as separator, tokens, separator: its first token has a context, its end is
learned, and its predictions cover the whole text. With `bytes` the separator is byte 0, which
ordinary text does not contain (a text that does is a bad record), so that the vocabulary is 256.
The `tokenizers` package reads and trains subword vocabularies.

Text that spells a special token, such as <|endoftext|>, is encoded as text, not as that token.

To add a tokenizer: a config that extends `TokenizerConfig`, its row under `tokenizer` in
`jaxmoe/catalog/runs.py`, `tests/test_architecture.py` (its name).
"""

from jaxmoe.catalog import Registry
from pallas_kernels.public_names import load_when_used

load_when_used(__name__)

TOKENIZERS = Registry("tokenizer")
