# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Batching policies that only a simulator can run, and all that it can run.

To add one: a config that extends `SimulatedBatchingConfig` in a file of its own in this folder, its
row under `simulated_batching` in `jaxmoe/catalog/serving.py`, a row in
`tests/jaxmoe/contrib/serving_lab/test_batching.py`.
"""

from collections import ChainMap

from jaxmoe.catalog import Registry
from jaxmoe.serve.policies.batching import BATCHING

SIMULATED_BATCHING = Registry("simulated_batching")
EVERY_BATCHING = ChainMap(SIMULATED_BATCHING, BATCHING)  # pyright: ignore[reportArgumentType]
"""Policies of engines, then those of simulators alone."""
