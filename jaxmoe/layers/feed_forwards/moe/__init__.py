# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The Mixture-of-Experts feed-forward."""

from jaxmoe.layers.feed_forwards.moe.config import MoEConfig as MoEConfig
