# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Feed-forwards: the half of a layer that computes on each token.

To add a feed-forward: a file jaxmoe/layers/feed_forwards/<name>.py with its config and its module,
a member of `FeedForwards` in jaxmoe/layers/feed_forwards/__init__.py, and its name in
tests/test_architecture.py. jaxmoe/layers/feed_forwards/dense.py shows what a config has.
"""

from jaxmoe.contrib.layers.two_sizes import TwoSizesConfig as TwoSizesConfig
from jaxmoe.contrib.layers.ultra_mem import UltraMemConfig as UltraMemConfig
from jaxmoe.layers.feed_forwards.dense import DenseConfig as DenseConfig
from jaxmoe.layers.feed_forwards.moe import MoEConfig as MoEConfig

FeedForwards = DenseConfig | MoEConfig | UltraMemConfig | TwoSizesConfig
"""The feed-forward configs."""
