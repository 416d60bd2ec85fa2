# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
from jaxmoe.catalog import Registry
from jaxmoe.contrib.depth.two_sizes import TwoSizesConfig as TwoSizesConfig
from jaxmoe.contrib.depth.ultra_mem import UltraMemConfig as UltraMemConfig
from jaxmoe.layers.context import FeedForwardBase as FeedForwardBase
from jaxmoe.layers.feed_forwards.activations import ActivationBase as ActivationBase
from jaxmoe.layers.feed_forwards.activations import ClampedSwiGLUConfig as ClampedSwiGLUConfig
from jaxmoe.layers.feed_forwards.activations import GeGLUConfig as GeGLUConfig
from jaxmoe.layers.feed_forwards.activations import ReLUSquaredConfig as ReLUSquaredConfig
from jaxmoe.layers.feed_forwards.activations import SwiGLUConfig as SwiGLUConfig
from jaxmoe.layers.feed_forwards.dense import DenseConfig as DenseConfig
from jaxmoe.layers.feed_forwards.moe import MoEConfig as MoEConfig

ACTIVATIONS: Registry
FEED_FORWARDS: Registry
