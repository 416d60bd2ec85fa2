# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
from jaxmoe.catalog import Registry
from jaxmoe.contrib.depth.two_sizes import TwoSizesConfig as TwoSizesConfig
from jaxmoe.contrib.depth.ultra_mem import UltraMemConfig as UltraMemConfig
from jaxmoe.layers.context import FeedForwardBase as FeedForwardBase
from jaxmoe.layers.feed_forwards.dense import DenseConfig as DenseConfig
from jaxmoe.layers.feed_forwards.moe import MoEConfig as MoEConfig

FEED_FORWARDS: Registry
