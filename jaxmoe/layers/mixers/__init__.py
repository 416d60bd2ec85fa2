# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Mixers: the half of a layer that moves information between tokens.

To add a mixer: a file jaxmoe/layers/mixers/<name>.py with its config and its module, a member of
`Mixers` in jaxmoe/layers/mixers/__init__.py, and its name in tests/test_architecture.py.
jaxmoe/layers/mixers/attention.py shows the attributes and methods of a config.
"""

from jaxmoe.contrib.layers.parallel_streams import ParallelStreamsConfig as ParallelStreamsConfig
from jaxmoe.contrib.layers.shared_keys import SharedKeysConfig as SharedKeysConfig
from jaxmoe.layers.mixers.attention import AttentionConfig as AttentionConfig
from jaxmoe.layers.mixers.latent_attention import LatentAttentionConfig as LatentAttentionConfig
from jaxmoe.layers.mixers.mamba import MambaConfig as MambaConfig
from jaxmoe.layers.mixers.mamba2 import Mamba2Config as Mamba2Config

Mixers = (
    AttentionConfig
    | LatentAttentionConfig
    | MambaConfig
    | Mamba2Config
    | SharedKeysConfig
    | ParallelStreamsConfig
)
"""The mixer configs."""
