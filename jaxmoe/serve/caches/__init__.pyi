# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
from jaxmoe.catalog import Registry
from jaxmoe.serve.caches.base import ItemCacheConfig as ItemCacheConfig
from jaxmoe.serve.caches.base import Use as Use
from jaxmoe.serve.caches.belady import BeladyConfig as BeladyConfig
from jaxmoe.serve.caches.category import CategoryConfig as CategoryConfig
from jaxmoe.serve.caches.expert_trace import expert_uses as expert_uses
from jaxmoe.serve.caches.expert_trace import layer_uses as layer_uses
from jaxmoe.serve.caches.lfu import LFUConfig as LFUConfig
from jaxmoe.serve.caches.lru import LRUConfig as LRUConfig
from jaxmoe.serve.caches.predicted import PredictedConfig as PredictedConfig
from jaxmoe.serve.caches.replay import BoundedCache as BoundedCache
from jaxmoe.serve.caches.replay import Replayed as Replayed
from jaxmoe.serve.caches.replay import replay as replay
from jaxmoe.serve.caches.scores import ScoresConfig as ScoresConfig
from jaxmoe.serve.caches.window import WindowConfig as WindowConfig

ITEM_CACHES: Registry
