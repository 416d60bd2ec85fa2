# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The HyperP ladder d8 to d24 (`jaxmoe.models.presets.ladder`), to be trained from scratch.

    python -m experiments.describe d12
    python -m experiments.pretrain d8

Shapes, vocabulary and sequence length are the paper's. Data is the embedded corpus, 10 MB of bytes,
so that the command runs as it stands: 305 steps of 2^17 tokens pass over it four times, and use 256
of the 32,000 token ids. That shows speed and routing, not what the model can learn. With data of
your own, the paper's budget is `ladder_tokens(depth)` tokens in batches of 2^21
(--training.batch_size 512 --training.accumulation 64):

    rung   parameters   active   tokens    --training.steps
    d8         0.91e9   0.21e9    10.4e9    4960
    d12        2.95e9   0.57e9    28.5e9   13585
    d16        6.88e9   1.24e9    61.9e9   29505
    d20       13.33e9   2.32e9   115.6e9   55119
    d24       22.93e9   3.90e9   194.7e9   92824

A parameter, its two moments and its gradient take 16 bytes, and 4 more while micro-batches are
added up: 18 GB for d8, 459 GB for d24, spread over all devices. The optimiser is AdamW under the
standard parameterisation until HyperP and MuonH are there; its learning rate is not tuned. None of
these runs was made: tested are shapes and counts, and d8 shrunken to 2 layers of width 32 ran.

To add a rung: its depth in LADDER_DEPTHS of `jaxmoe/models/presets.py`, and a function here.
"""

from experiments.config import (
    CheckpointConfig,
    EvaluationConfig,
    PretrainConfig,
    TrainingConfig,
)
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.config import ModelConfig
from jaxmoe.models.presets import ladder
from jaxmoe.optim import AdamWConfig, CosineConfig


def large(model: ModelConfig, learning_rate: float) -> PretrainConfig:
    """A model of billions of parameters on the corpus: what all large recipes have in common.

    Args:
        model: what is trained.
        learning_rate: peak of AdamW.
    """
    return PretrainConfig(
        model=model,
        # 8 devices at most: a micro-batch then is one sequence on each. More: accumulate less.
        training=TrainingConfig(steps=305, batch_size=32, sequence_length=4096, accumulation=4),
        optimizer=AdamWConfig(learning_rate=learning_rate),
        schedule=CosineConfig(warmup_steps=30),
        # Logits of a whole sequence would outweigh its activations.
        execution=ExecutionConfig(remat="full", loss_chunk=512),
        evaluation=EvaluationConfig(every=100, batches=2),
        checkpoint=CheckpointConfig(every=100),
    )


def d8() -> PretrainConfig:
    """HyperP ladder, depth 8: 0.91e9 parameters, 0.21e9 active.

    python -m experiments.pretrain d8

    One accelerator of 40 GB or more; not run yet.
    """
    return large(ladder(8), learning_rate=6e-4)


def d12() -> PretrainConfig:
    """HyperP ladder, depth 12: 2.95e9 parameters, 0.57e9 active.

    python -m experiments.pretrain d12

    One accelerator of 80 GB or more; not run yet.
    """
    return large(ladder(12), learning_rate=4e-4)


def d16() -> PretrainConfig:
    """HyperP ladder, depth 16: 6.88e9 parameters, 1.24e9 active.

    python -m experiments.pretrain d16

    Two accelerators of 140 GB or more; not run yet.
    """
    return large(ladder(16), learning_rate=3e-4)


def d20() -> PretrainConfig:
    """HyperP ladder, depth 20: 13.3e9 parameters, 2.32e9 active.

    python -m experiments.pretrain d20

    Four accelerators of 140 GB or more; not run yet.
    """
    return large(ladder(20), learning_rate=3e-4)


def d24() -> PretrainConfig:
    """HyperP ladder, depth 24: 22.9e9 parameters, 3.90e9 active.

    python -m experiments.pretrain d24

    Eight accelerators of 80 GB or more; not run yet.
    """
    return large(ladder(24), learning_rate=2e-4)
