# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`tiny` with Mamba-2 in place of attention in three layers of four, at equal FLOPs per token."""

import dataclasses

from experiments.recipes.recipe import recipe
from experiments.recipes.tiny import tiny
from jaxmoe.layers import mixers
from jaxmoe.models.config import LayerConfig
from jaxmoe.run.config import PretrainConfig


@recipe
def hybrid() -> PretrainConfig:
    """A small byte-level MoE of Mamba-2 and attention on the source of Python's standard library.

    jaxmoe pretrain hybrid

    2 CPU cores: 1.96 bits per byte held out, where `tiny` reaches 2.02 (means of three seeds).
    """
    config = tiny()
    recurrent = LayerConfig(mixer=mixers.Mamba2Config(num_heads=6, head_dim=32, state_dim=32))
    layers = (recurrent, recurrent, LayerConfig(), recurrent)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, layers=layers))
