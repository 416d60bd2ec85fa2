# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Lists the readings of a cache."""

from sharding.sequence_parallel.reading.page_selection import PageSelectionConfig
from sharding.sequence_parallel.reading.whole_cache import WholeCacheConfig

CacheReading = WholeCacheConfig | PageSelectionConfig
"""Which part of a cache a generated token attends to; a selection changes what is generated."""

WHOLE_CACHE = WholeCacheConfig()
"""The usual reading: all of the cache."""
