# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
from sharding.sequence_parallel.all_gather import AllGatherKVConfig as AllGatherKVConfig
from sharding.sequence_parallel.attend import attend as attend
from sharding.sequence_parallel.attend import sequence_ranks as sequence_ranks
from sharding.sequence_parallel.auto import AutoSequenceParallelConfig as AutoSequenceParallelConfig
from sharding.sequence_parallel.auto import choose as choose
from sharding.sequence_parallel.cache_formats import CacheFormat as CacheFormat
from sharding.sequence_parallel.cache_formats import as_cached as as_cached
from sharding.sequence_parallel.cache_formats import bytes_per_token as bytes_per_token
from sharding.sequence_parallel.cache_formats import empty_slots as empty_slots
from sharding.sequence_parallel.cached import CACHE_AXES as CACHE_AXES
from sharding.sequence_parallel.cached import KVCache as KVCache
from sharding.sequence_parallel.cached import NewTokens as NewTokens
from sharding.sequence_parallel.cached_latent import LATENT_CACHE_AXES as LATENT_CACHE_AXES
from sharding.sequence_parallel.cached_latent import attend_latent as attend_latent
from sharding.sequence_parallel.form import FormChoice as FormChoice
from sharding.sequence_parallel.form import SequenceForm as SequenceForm
from sharding.sequence_parallel.form import SequenceParallelism as SequenceParallelism
from sharding.sequence_parallel.form import TokenOrder as TokenOrder
from sharding.sequence_parallel.local_attention import AttentionRules as AttentionRules
from sharding.sequence_parallel.none import NoSequenceParallelConfig as NoSequenceParallelConfig
from sharding.sequence_parallel.paged import PagedCache as PagedCache
from sharding.sequence_parallel.paged import PageTables as PageTables
from sharding.sequence_parallel.paged import empty_pages as empty_pages
from sharding.sequence_parallel.paged import page_axes as page_axes
from sharding.sequence_parallel.paged_latent import PagedLatents as PagedLatents
from sharding.sequence_parallel.reading.page_selection import (
    PageSelectionConfig as PageSelectionConfig,
)
from sharding.sequence_parallel.reading.readings import WHOLE_CACHE as WHOLE_CACHE
from sharding.sequence_parallel.reading.readings import CacheReading as CacheReading
from sharding.sequence_parallel.reading.readings import WholeCacheConfig as WholeCacheConfig
from sharding.sequence_parallel.ring import RingConfig as RingConfig
from sharding.sequence_parallel.sizes import AttentionSizes as AttentionSizes
from sharding.sequence_parallel.token_ring import TokenRingConfig as TokenRingConfig
from sharding.sequence_parallel.ulysses import UlyssesConfig as UlyssesConfig
from sharding.sequence_parallel.usp import UlyssesRingConfig as UlyssesRingConfig
