# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""What runs beside the exchange of a step that sends, compiled for described TPUs."""

from typing import Any

import jax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxmoe.contrib.slow_links import CO2Config
from jaxmoe.contrib.slow_links.workers.state import WorkerTraining
from jaxmoe.contrib.slow_links.workers.step import make_worker_step
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.config import AttentionConfig, ModelConfig, MoEConfig
from jaxmoe.optim import AdamWConfig, adamw
from jaxmoe.planning.abstract_step import StepPlan, abstract_batch, abstract_state
from jaxmoe.precision import PrecisionPolicy
from jaxmoe.scaling.initialize import parameter_table
from jaxmoe.training.step import Step
from sharding import MeshConfig, make_mesh
from tests.support.overlap import spans
from tests.support.tpus import described_tpus

MODEL = ModelConfig(
    vocab_size=4096,
    num_layers=4,
    embed_dim=512,
    attention=AttentionConfig(num_heads=8, num_kv_heads=4, head_dim=64),
    moe=MoEConfig(num_experts=8, top_k=2, expert_dim=512),
)
EXECUTION = ExecutionConfig(
    mesh=MeshConfig(replica=2, data=4), precision=PrecisionPolicy(compute="bfloat16")
)


@pytest.mark.large
def test_products_of_a_step_run_beside_the_message_of_co2(monkeypatch):
    """Half of the bytes with libtpu 0.0.42; the others lie beside sums, updates and merges."""
    mesh = make_mesh(EXECUTION.mesh, described_tpus(monkeypatch, "v5e:2x4"))
    table = parameter_table(MODEL, None, EXECUTION.axis_rules)
    plan = StepPlan(
        model=MODEL,
        table=table,
        optimizer=adamw(1e-3),
        optimizer_config=AdamWConfig(),
        execution=EXECUTION,
        batch_size=16,
        sequence_length=512,
    )
    step = Step(model=MODEL, optimizer=plan.optimizer, execution=EXECUTION, table=table)
    training = WorkerTraining.of(CO2Config(every=4), table, step, steps=100)

    def placed(leaf: Any) -> Any:
        spec = getattr(leaf.sharding, "spec", PartitionSpec())
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        state = jax.tree.map(placed, jax.eval_shape(training.begin, abstract_state(plan, mesh)))
        traced = make_worker_step(training).trace(state, abstract_batch(plan, mesh))
    permutes = [
        span
        for span in spans(traced.lower().compile().as_text())
        if span.kind == "collective-permute"
    ]
    beside = [span for span in permutes if span.products]
    # A permute to the one that sums, and one back, of all large parameters.
    assert len(permutes) == 16
    assert sum(span.size for span in beside) >= 0.4 * sum(span.size for span in permutes)
    # The largest message has the whole forward and backward pass.
    assert max(permutes, key=lambda span: (span.size, span.products)).products >= 2
