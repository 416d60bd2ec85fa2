# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Packs the documents of a step into micro-batches by level, for attention by level.

At level l the devices of a row form groups of 2^l, and each group attends to documents of its own
(`jaxmoe/contrib/levels/by_level.py`). An assigner chooses the level of every document.

To add an assigner: a file in `jaxmoe/contrib/levels/` with a subclass of `LevelAssigner` (plan.py),
its row under `assign` in `jaxmoe/catalog/runs.py`.
"""

from jaxmoe.catalog import Registry
from pallas_kernels.public_names import load_when_used

load_when_used(__name__)

ASSIGNERS = Registry("assign")
