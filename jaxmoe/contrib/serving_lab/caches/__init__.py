# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Caches of items: experts, layers, models, prefixes or answers, replayed on traces of uses.

To add a policy: a config that extends `ItemCacheConfig` in a file of its own in this folder, its
row under `item_cache` in `jaxmoe/catalog/serving.py`, its property in
`tests/jaxmoe/contrib/serving_lab/caches/test_caches.py`.
"""

from jaxmoe.catalog import Registry
from pallas_kernels.public_names import load_when_used

load_when_used(__name__)

ITEM_CACHES = Registry("item_cache")
