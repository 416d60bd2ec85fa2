# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Provides sources of rows, and the loader that computes a batch from seed and global step.

Text takes the path file -> record (`reading`) -> document (`documents`, the planning pass) -> row
(`packing`) -> batch (`loader`).

To add a source: `jaxmoe/data/source.py` (the interface to implement, in a file of its own),
`jaxmoe/catalog/runs.py` (its row under `data`), `tests/test_architecture.py` (its name).
"""

from jaxmoe.catalog import Registry
from pallas_kernels.public_names import load_when_used

load_when_used(__name__)

DATA_SOURCES = Registry("data")
