# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Mixers: the half of a layer that moves information between tokens.

To add a mixer: a file jaxmoe/layers/mixers/<name>.py with its config and its module, which the
config names, its row under `mixer` in jaxmoe/catalog/layers.py, its row of MIXERS in
tests/jaxmoe/layers/test_member_contract.py, and a test. jaxmoe/layers/README.md has the steps, the
attributes and methods of a config, and an example.
"""

from jaxmoe.catalog import Registry
from pallas_kernels.public_names import load_when_used

load_when_used(__name__)

MIXERS = Registry("mixer")
