# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Some steps of a run on a mesh with stages: losses, parameters, router state of one device."""

import dataclasses

import numpy as np
import pytest

from jaxmoe.contrib.few_bits.halo import HaloConfig
from jaxmoe.data import MarkovConfig
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.config import (
    AttentionConfig,
    LatentAttentionConfig,
    LayerConfig,
    ModelConfig,
    MoEConfig,
)
from jaxmoe.optim import AdamWConfig, LinearConfig, MuonHConfig
from jaxmoe.precision import PrecisionPolicy
from jaxmoe.routing import METHODS
from jaxmoe.run.assemble import assemble
from jaxmoe.run.config import EvaluationConfig, PretrainConfig, TrainingConfig
from jaxmoe.run.plan import make_plan
from jaxmoe.scaling import HyperPConfig
from jaxmoe.training import MaskedDiffusionConfig
from jaxmoe.training.guard import GuardConfig
from sharding import MeshConfig, MoEMesh
from sharding.expert_parallel import AllToAllConfig
from sharding.pipeline import InterleavedConfig
from tests.fuzz.meshes import Steps, differences, on_one_device, parameters

MOE = MoEConfig(num_experts=4, top_k=2, expert_dim=16)
HEADS = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8)
LATENT = LatentAttentionConfig(num_heads=4, latent_dim=8, nope_dim=4, rope_dim=4, value_dim=8)
MODEL = ModelConfig(vocab_size=32, num_layers=4, embed_dim=16, attention=HEADS, moe=MOE)
RUN = PretrainConfig(
    model=MODEL,
    data=MarkovConfig(order=1, vocab_size=16),
    training=TrainingConfig(
        steps=8,
        batch_size=16,
        sequence_length=16,
        accumulation=4,
        guard=GuardConfig(max_norm_ratio=None),
    ),
    optimizer=AdamWConfig(epsilon=1e-2),
    schedule=LinearConfig(warmup_steps=1),
    evaluation=EvaluationConfig(batches=1, batch_size=8),
)
CYCLE = dataclasses.replace(MODEL, layers=(LayerConfig(), LayerConfig(mixer=LATENT)))
NOT_CAUSAL = dataclasses.replace(
    MODEL,
    num_layers=5,
    dense_layers=(0,),
    dense_dim=24,
    attention=dataclasses.replace(HEADS, is_causal=False),
    moe=dataclasses.replace(MOE, **METHODS["expert_choice"].parts(), top_k=4),
)
"""Every expert takes every token: among masked tokens rounding would decide."""
ROWS = {
    "muonh and a cycle of layers": (
        dataclasses.replace(
            RUN, model=CYCLE, optimizer=MuonHConfig(), parameterization=HyperPConfig()
        ),
        {"mesh": MeshConfig(stage=2, data=4)},
        5,
    ),
    "masked diffusion, expert choice": (
        dataclasses.replace(
            RUN,
            model=NOT_CAUSAL,
            training=dataclasses.replace(RUN.training, objective=MaskedDiffusionConfig()),
        ),
        {"mesh": MeshConfig(stage=2, data=2, tensor=2), "pipeline": InterleavedConfig(chunks=2)},
        2,
    ),
    "bfloat16": (
        RUN,
        {"mesh": MeshConfig(stage=4, data=2), "precision": PrecisionPolicy(compute="bfloat16")},
        2,
    ),
    "quantised products": (
        RUN,
        {
            "mesh": MeshConfig(stage=2, data=4),
            "precision": PrecisionPolicy(compute="float32", matmul=HaloConfig(block=8)),
        },
        2,
    ),
    "fold": (
        RUN,
        {
            "mesh": MeshConfig(stage=2, data=4),
            "fold": MoEMesh(expert=2, expert_tensor=2),
            "dispatcher": AllToAllConfig(),
        },
        2,
    ),
}


def _compare(config, execution, steps):
    execution = ExecutionConfig(**{"precision": PrecisionPolicy(compute="float32")} | execution)
    config = dataclasses.replace(config, execution=execution)
    assembly = assemble(config)
    alone = make_plan(dataclasses.replace(config, execution=on_one_device(execution)))
    values = parameters(alone, np.random.default_rng(0))
    rows = [assembly.loader.batch(step) for step in range(steps)]
    found = Steps(assembly.plan, assembly.execution, assembly.mesh).run(values, rows)
    wanted = Steps(alone, alone.config.execution, None).run(values, rows)
    far = {
        name: pair for name, pair in differences(found, wanted, config).items() if pair[0] > pair[1]
    }
    assert not far


@pytest.mark.slow
@pytest.mark.rows(2)
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_steps_on_stages_equal_those_of_one_device(row):
    _compare(*row)
