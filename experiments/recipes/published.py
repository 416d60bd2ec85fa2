# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Published models, to be trained from scratch: OLMoE-1B-7B, Mixtral-8x7B, Qwen3-30B-A3B.

    python -m experiments.describe qwen3_30b_a3b

Sizes, router and balance losses are the papers' (`jaxmoe.models.presets`); data, batch, optimiser
(AdamW, its rate not tuned) and schedule are those of `large`, not the papers': 305 steps of 2^17
tokens pass over the embedded corpus four times. Their trained weights are read by
`jaxmoe.checkpoint.from_huggingface`. None of these runs was made: tested are sizes.

To add a model: a preset, and a function here.
"""

from experiments.recipes.ladder import large
from experiments.recipes.recipe import recipe
from jaxmoe.models.presets import PRESETS
from jaxmoe.run.config import PretrainConfig


@recipe
def olmoe_1b_7b() -> PretrainConfig:
    """OLMoE-1B-7B: 6.92e9 parameters, 1.28e9 active, 8 of 64 experts.

    python -m experiments.pretrain olmoe_1b_7b

    Two accelerators of 140 GB or more; not run yet.
    """
    return large(PRESETS["olmoe_1b_7b"](), learning_rate=4e-4)


@recipe
def mixtral_8x7b() -> PretrainConfig:
    """Mixtral-8x7B: 46.7e9 parameters, 12.9e9 active, 2 of 8 experts.

    python -m experiments.pretrain mixtral_8x7b

    Eight accelerators of 140 GB or more; not run yet.
    """
    return large(PRESETS["mixtral_8x7b"](), learning_rate=2e-4)


@recipe
def qwen3_30b_a3b() -> PretrainConfig:
    """Qwen3-30B-A3B: 30.5e9 parameters, 3.35e9 active, 8 of 128 experts.

    python -m experiments.pretrain qwen3_30b_a3b

    Eight accelerators of 140 GB or more; not run yet.
    """
    return large(PRESETS["qwen3_30b_a3b"](), learning_rate=2e-4)
