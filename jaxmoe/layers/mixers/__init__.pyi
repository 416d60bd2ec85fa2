# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
from jaxmoe.catalog import Registry
from jaxmoe.contrib.depth.parallel_streams import ParallelStreamsConfig as ParallelStreamsConfig
from jaxmoe.contrib.depth.shared_keys import SharedKeysConfig as SharedKeysConfig
from jaxmoe.layers.context import MixerBase as MixerBase
from jaxmoe.layers.mixers.attention import AttentionConfig as AttentionConfig
from jaxmoe.layers.mixers.latent_attention import LatentAttentionConfig as LatentAttentionConfig
from jaxmoe.layers.mixers.mamba import MambaConfig as MambaConfig
from jaxmoe.layers.mixers.mamba2 import Mamba2Config as Mamba2Config

MIXERS: Registry
