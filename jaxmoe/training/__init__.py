# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Trains models: state, objectives, loss, step, loop, evaluation and hooks.

To add an objective: `jaxmoe/training/next_token.py` as the example, and its row under
`objective` in `jaxmoe/catalog/runs.py`.
"""

from jaxmoe.catalog import Registry
from pallas_kernels.public_names import load_when_used

load_when_used(__name__)

OBJECTIVES = Registry("objective")
