# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The HyperP ladder, to be trained from scratch: 0.93e9 to 23.3e9 parameters at depths 8 to 24.

    jaxmoe describe d12
    jaxmoe pretrain d8 --data.path my_texts/ data.tokenizer:trained

One learning rate for all rungs: HyperP with MuonH, eta0 0.014 (the paper's for mixtures, tuned at
depth 8), no warm-up, linear to a tenth; the laws carry it to each rung. Shapes, vocabulary,
sequence length, batch and tokens are the paper's: 50 tokens per parameter of the dense model, 2^21
a step. There are 64 routed experts, which devices divide (`--execution.mesh.expert 8`); with
`--model.moe.num_experts 63` it is the paper's model.

    rung   parameters   active   tokens    steps   learning rate   memory
    d8         0.93e9   0.21e9    10.4e9    4960         0.01400    15 GB
    d12        2.99e9   0.57e9    28.5e9   13585         0.00828    48 GB
    d16        6.98e9   1.24e9    61.9e9   29505         0.00559   112 GB
    d20       13.53e9   2.32e9   115.6e9   55119         0.00410   217 GB
    d24       23.27e9   3.90e9   194.7e9   92824         0.00317   373 GB

Memory over all devices: a parameter, its moment and its gradient take 12 bytes (16 under Adam:
embedding and head), and 4 more while micro-batches are added up; activations come on top. A
micro-batch of 8 sequences is one for each of 8 devices: on more, accumulate less
(--training.accumulation 32) and hold out more at a time (--evaluation.batch_size 16).

Bring data of your own: without `data:files` a recipe reads the embedded corpus, 10 MB of bytes,
about a thousand times over, which shows speed and routing and not what the model can learn. None of
these runs was made: tested are shapes, counts and rates.

To add a rung: its depth in LADDER_DEPTHS of `jaxmoe/models/presets.py`, and a function here.
"""

import dataclasses

from experiments.recipes.recipe import recipe
from jaxmoe.execution import ExecutionConfig, Remat
from jaxmoe.models.config import ModelConfig
from jaxmoe.models.presets import ladder, ladder_tokens
from jaxmoe.optim import AdamWConfig, CosineConfig, LinearConfig, MuonHConfig
from jaxmoe.run.config import (
    CheckpointConfig,
    EvaluationConfig,
    PretrainConfig,
    TrainingConfig,
)
from jaxmoe.scaling import HYPERP_BASE, Budget, HyperPConfig

_SEQUENCE_LENGTH = 4096
_BATCH_SIZE = 512


def large(model: ModelConfig, learning_rate: float, remat: Remat = "full") -> PretrainConfig:
    """Return what recipes of billions of parameters share: corpus, batch and memory savings.

    Args:
        model: Model to train.
        learning_rate: Peak learning rate of AdamW.
        remat: What the backward pass computes again.
    """
    return PretrainConfig(
        model=model,
        # 8 devices at most: a micro-batch then is one sequence on each. More: accumulate less.
        training=TrainingConfig(
            steps=305, batch_size=32, sequence_length=_SEQUENCE_LENGTH, accumulation=4
        ),
        optimizer=AdamWConfig(learning_rate=learning_rate),
        schedule=CosineConfig(warmup_steps=30),
        # Logits of a whole sequence would outweigh its activations.
        execution=ExecutionConfig(remat=remat, loss_chunk=512),
        evaluation=EvaluationConfig(every=100, batches=8, batch_size=8),
        checkpoint=CheckpointConfig(every=100),
    )


def _rung(depth: int) -> PretrainConfig:
    """Return HyperP at one depth, with the paper's batch and tokens."""
    model = ladder(depth)
    budget = Budget(tokens=ladder_tokens(depth), batch_tokens=_BATCH_SIZE * _SEQUENCE_LENGTH)
    return dataclasses.replace(
        large(model, learning_rate=0.014),
        training=TrainingConfig(
            steps=budget.steps,
            batch_size=_BATCH_SIZE,
            sequence_length=_SEQUENCE_LENGTH,
            accumulation=64,
        ),
        optimizer=MuonHConfig(learning_rate=0.014),
        schedule=LinearConfig(warmup_steps=0, floor=0.1),
        parameterization=HyperPConfig(),
        base=HYPERP_BASE,
        evaluation=EvaluationConfig(every=500, batches=8, batch_size=8),
        checkpoint=CheckpointConfig(every=500),
    )


@recipe
def d8() -> PretrainConfig:
    """HyperP ladder, depth 8: 0.93e9 parameters, 0.21e9 active.

    jaxmoe pretrain d8

    One accelerator of 40 GB or more; not run yet.
    """
    return _rung(8)


@recipe
def d12() -> PretrainConfig:
    """HyperP ladder, depth 12: 2.99e9 parameters, 0.57e9 active.

    jaxmoe pretrain d12

    One accelerator of 80 GB or more; not run yet.
    """
    return _rung(12)


@recipe
def d16() -> PretrainConfig:
    """HyperP ladder, depth 16: 6.98e9 parameters, 1.24e9 active.

    jaxmoe pretrain d16

    Two accelerators of 140 GB or more; not run yet.
    """
    return _rung(16)


@recipe
def d20() -> PretrainConfig:
    """HyperP ladder, depth 20: 13.5e9 parameters, 2.32e9 active.

    jaxmoe pretrain d20

    Four accelerators of 140 GB or more; not run yet.
    """
    return _rung(20)


@recipe
def d24() -> PretrainConfig:
    """HyperP ladder, depth 24: 23.3e9 parameters, 3.90e9 active.

    jaxmoe pretrain d24

    Eight accelerators of 80 GB or more; not run yet.
    """
    return _rung(24)
