# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""What runs beside the messages of a pipeline and the copies of an offloaded step, for described
TPUs; the docstrings of `sharding/pipeline/executor.py` and `streamed_scan.py` have the numbers."""

import pytest

from jaxmoe.execution import ExecutionConfig, OffloadConfig
from jaxmoe.models.config import AttentionConfig, ModelConfig, MoEConfig
from jaxmoe.optim import AdamWConfig, adamw
from jaxmoe.planning.abstract_step import StepPlan, trace_step
from jaxmoe.precision import PrecisionPolicy
from jaxmoe.scaling.initialize import parameter_table
from sharding import MeshConfig, make_mesh
from tests.support.overlap import Span, host_copies, spans
from tests.support.tpus import described_tpus

MODEL = ModelConfig(
    vocab_size=4096,
    num_layers=8,
    embed_dim=512,
    attention=AttentionConfig(num_heads=8, num_kv_heads=4, head_dim=64),
    moe=MoEConfig(num_experts=8, top_k=2, expert_dim=512),
)


def _compiled(monkeypatch, execution: ExecutionConfig, accumulation: int) -> str:
    mesh = make_mesh(execution.mesh, described_tpus(monkeypatch, "v5e:2x4"))
    plan = StepPlan(
        model=MODEL,
        table=parameter_table(MODEL, None, execution.axis_rules),
        optimizer=adamw(1e-3),
        optimizer_config=AdamWConfig(),
        execution=execution,
        batch_size=32,
        sequence_length=512,
        accumulation=accumulation,
    )
    return trace_step(plan, mesh).lower().compile().as_text()


def _share_beside(found: list[Span]) -> float:
    return sum(one.size for one in found if one.products) / sum(one.size for one in found)


@pytest.mark.large
def test_half_of_the_messages_of_a_pipeline_have_products_beside_them(monkeypatch):
    execution = ExecutionConfig(
        mesh=MeshConfig(stage=4, data=2), precision=PrecisionPolicy(compute="bfloat16")
    )
    found = spans(_compiled(monkeypatch, execution, 8))
    permutes = [one for one in found if one.kind == "collective-permute"]
    assert len(permutes) == 4
    assert _share_beside(permutes) >= 0.5


@pytest.mark.large
def test_an_eighth_of_the_copies_of_an_offloaded_step_has_products_beside_it(monkeypatch):
    execution = ExecutionConfig(
        mesh=MeshConfig(data=8),
        precision=PrecisionPolicy(compute="bfloat16"),
        remat="full",
        offload=OffloadConfig(parameters="host"),
    )
    copies = host_copies(_compiled(monkeypatch, execution, 1))
    assert len(copies) > 100
    assert _share_beside(copies) >= 0.12
