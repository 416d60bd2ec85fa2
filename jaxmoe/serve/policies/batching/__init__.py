# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Batching policies: what an instance computes in its next step.

To add one: a config that extends `BatchingConfig` in a file of its own in this folder, its row
under `batching` in `jaxmoe/catalog/serving.py`, a row in
`tests/jaxmoe/contrib/serving_lab/test_batching.py`.
"""

from jaxmoe.catalog import Registry
from pallas_kernels.public_names import load_when_used

load_when_used(__name__)

BATCHING = Registry("batching")
