# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
from jaxmoe.catalog import Registry
from jaxmoe.contrib.serving_lab.caches.base import ItemCacheConfig as ItemCacheConfig
from jaxmoe.contrib.serving_lab.caches.base import Use as Use
from jaxmoe.contrib.serving_lab.caches.belady import BeladyConfig as BeladyConfig
from jaxmoe.contrib.serving_lab.caches.category import CategoryConfig as CategoryConfig
from jaxmoe.contrib.serving_lab.caches.expert_trace import expert_uses as expert_uses
from jaxmoe.contrib.serving_lab.caches.expert_trace import layer_uses as layer_uses
from jaxmoe.contrib.serving_lab.caches.lfu import LFUConfig as LFUConfig
from jaxmoe.contrib.serving_lab.caches.lru import LRUConfig as LRUConfig
from jaxmoe.contrib.serving_lab.caches.predicted import PredictedConfig as PredictedConfig
from jaxmoe.contrib.serving_lab.caches.replay import BoundedCache as BoundedCache
from jaxmoe.contrib.serving_lab.caches.replay import Replayed as Replayed
from jaxmoe.contrib.serving_lab.caches.replay import replay as replay
from jaxmoe.contrib.serving_lab.caches.scores import ScoresConfig as ScoresConfig
from jaxmoe.contrib.serving_lab.caches.window import WindowConfig as WindowConfig

ITEM_CACHES: Registry
