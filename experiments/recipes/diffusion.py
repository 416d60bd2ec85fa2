# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Masked diffusion with expert choice: how near to the entropy does the bound come?"""

from experiments.recipes.recipe import recipe
from jaxmoe import data, routing, training
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.config import AttentionConfig, ModelConfig, MoEConfig
from jaxmoe.optim import AdamWConfig, LinearConfig
from jaxmoe.routing import RouterZConfig, SoftmaxGateConfig
from jaxmoe.run.config import EvaluationConfig, PretrainConfig, TrackingConfig, TrainingConfig


@recipe
def diffusion() -> PretrainConfig:
    """Masked diffusion on a Markov chain of order 2, expert choice with linear_reverse capacity.

    jaxmoe pretrain diffusion

    2 CPU cores: a few minutes, a bound of 1.158 bits per token, 0.036 above the exact entropy.
    """
    return PretrainConfig(
        model=ModelConfig(
            vocab_size=5,
            num_layers=2,
            embed_dim=96,
            attention=AttentionConfig(
                num_heads=6,
                num_kv_heads=6,
                head_dim=16,
                rope_theta=50.0,
                window=5,
                is_causal=False,
            ),
            moe=MoEConfig(
                num_experts=4,
                top_k=2,
                expert_dim=192,
                router=routing.ExpertChoiceConfig(schedule="linear_reverse"),
                gate=SoftmaxGateConfig(),
                balancers=(RouterZConfig(),),
            ),
        ),
        data=data.MarkovConfig(vocab_size=4, concentration=0.5),
        training=TrainingConfig(
            steps=1000,
            batch_size=32,
            sequence_length=32,
            objective=training.MaskedDiffusionConfig(min_time=0.05),
        ),
        optimizer=AdamWConfig(learning_rate=5e-3),
        schedule=LinearConfig(warmup_steps=20, floor=0.02),
        execution=ExecutionConfig(unroll=2),
        evaluation=EvaluationConfig(every=200, batches=16),
        tracking=TrackingConfig(sample_length=24),
    )
