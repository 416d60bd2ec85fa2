# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""A small byte-level MoE on the source of Python's standard library, trained with HyperP.

The recipe is its own base point: with another --model.num_layers, --model.embed_dim,
--training.steps or --training.batch_size the laws carry the learning rate from here.

MuonH keeps the norm of the head, so that the loss begins above ln V by half the variance of the
logits. `logit_bound` 5.12 gives them a standard deviation of 0.45, and the first loss is 0.1 above
ln 256 = 5.55. With 20.48, the paper's head at its base width, the first loss is 7.4 and the last
one the same.
"""

import dataclasses

from experiments.recipes.recipe import recipe
from jaxmoe.data import CorpusConfig
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models import presets
from jaxmoe.optim import LinearConfig, MuonHConfig
from jaxmoe.routing import METHODS
from jaxmoe.run.config import (
    CheckpointConfig,
    EvaluationConfig,
    PretrainConfig,
    TrainingConfig,
)
from jaxmoe.scaling import BasePoint, HyperPConfig


@recipe
def tiny() -> PretrainConfig:
    """The source of Python's standard library, byte level, on a laptop's CPU.

    jaxmoe pretrain

    2 CPU cores: a minute of training, 2.00 bits per byte held out; counts of 3 bytes reach 2.11.
    """
    model = presets.tiny()
    assert model.moe is not None
    moe = dataclasses.replace(model.moe, **METHODS["hyperp"].parts())
    model = dataclasses.replace(model, moe=moe)
    training = TrainingConfig(steps=300, batch_size=8, sequence_length=256)
    return PretrainConfig(
        model=model,
        data=CorpusConfig(),
        training=training,
        optimizer=MuonHConfig(learning_rate=0.03),
        schedule=LinearConfig(warmup_steps=0, floor=0.1),
        parameterization=HyperPConfig(base_head_dim=model.attention.head_dim, logit_bound=5.12),
        base=BasePoint(
            num_layers=model.num_layers,
            embed_dim=model.embed_dim,
            tokens=training.tokens,
            batch_tokens=training.batch_size * training.sequence_length,
        ),
        execution=ExecutionConfig(unroll=4),
        evaluation=EvaluationConfig(every=60, batches=16),
        checkpoint=CheckpointConfig(every=80),
    )
