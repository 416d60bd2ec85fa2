# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""A step on a mesh with stages: loss, gradient, load and router state as without a mesh."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from jaxmoe.execution import ExecutionConfig, KernelsConfig
from jaxmoe.layers.mixers import Mamba2Config
from jaxmoe.layers.residual import LadderResidualConfig
from jaxmoe.models.config import LayerConfig
from jaxmoe.models.transformer import Transformer, initial_router_state
from jaxmoe.routing import METHODS, CapacityConfig
from jaxmoe.run.measures import router_statistics
from jaxmoe.training.evaluate import make_eval_step
from jaxmoe.training.pipeline import check_pipeline, gradients, held_out_parts
from sharding import MeshConfig
from sharding.distributed import global_batch
from sharding.expert_parallel import AllToAllConfig
from sharding.pipeline import GPipeConfig, InterleavedConfig
from sharding.sequence_parallel import RingConfig, UlyssesConfig
from tests.support import one_step
from tests.support.meshes import mesh_of
from tests.support.models import FULL, TINY, tokens_for

FOUR = dataclasses.replace(TINY, num_layers=4)
DENSE_FIRST = dataclasses.replace(FULL, num_layers=5)
"""A dense layer before four MoE layers, tied embeddings."""
DENSE_LAST = dataclasses.replace(FULL, num_layers=5, dense_layers=(4,), has_tied_embeddings=False)

DEFERRED = InterleavedConfig(weight_gradients="deferred")
SPLIT = KernelsConfig(grouped_swiglu="reference")
"""Experts whose backward pass can be split: not the fused one that CPUs use."""

HYBRID = dataclasses.replace(
    FOUR,
    layers=(
        LayerConfig(mixer=Mamba2Config(num_heads=4, head_dim=4, state_dim=4, chunk=4)),
        LayerConfig(),
    ),
)
"""Two repeats of a recurrent and an attending layer, one in each of two stages."""

AROUND = dataclasses.replace(
    FULL, num_layers=6, dense_layers=(1, 4), has_tied_embeddings=False, dense_dim=24
)
"""A MoE and a dense layer before two MoE layers, and after them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    model: object = FOUR
    parts: int = 4
    form: str = "buffer"
    mesh: MeshConfig
    execution: dict = dataclasses.field(default_factory=dict)
    skipping: object = None


def with_method(name):
    return dataclasses.replace(FOUR, moe=dataclasses.replace(FOUR.moe, **METHODS[name].parts()))


FAST = {"interleaved": Row(mesh=MeshConfig(stage=2, data=2))}
SLOW = {
    "interleaved, dense first": Row(
        model=DENSE_FIRST, mesh=MeshConfig(stage=2, data=2, tensor=2), form="two_pass"
    ),
    "two chunks": Row(
        parts=2,
        mesh=MeshConfig(stage=2, data=2, expert=2),
        execution={"pipeline": InterleavedConfig(chunks=2), "dispatcher": AllToAllConfig()},
    ),
    "MoE layers around the stages": Row(
        model=AROUND, mesh=MeshConfig(stage=2, data=2), form="two_pass"
    ),
    "MoE layers around the stages, gpipe": Row(
        model=AROUND, mesh=MeshConfig(stage=2), execution={"pipeline": GPipeConfig()}
    ),
    "four stages": Row(mesh=MeshConfig(stage=4, data=2)),
    "deferred": Row(
        mesh=MeshConfig(stage=4, data=2),
        execution={"pipeline": DEFERRED, "kernels": SPLIT, "rules": "zero2", "remat": "full"},
    ),
    "deferred, dense first": Row(
        model=DENSE_FIRST,
        mesh=MeshConfig(stage=2, data=2, tensor=2),
        form="two_pass",
        execution={"pipeline": DEFERRED, "kernels": SPLIT},
    ),
    "deferred, two chunks": Row(
        parts=2,
        mesh=MeshConfig(stage=2, data=2, expert=2),
        execution={
            "pipeline": InterleavedConfig(chunks=2, weight_gradients="deferred"),
            "dispatcher": AllToAllConfig(),
        },
    ),
    "gpipe": Row(mesh=MeshConfig(stage=4, data=2), execution={"pipeline": GPipeConfig()}),
    "ladder": Row(
        model=dataclasses.replace(DENSE_FIRST, residual=LadderResidualConfig()),
        mesh=MeshConfig(stage=2, data=2),
    ),
    "recurrent and attending layers": Row(
        model=HYBRID, mesh=MeshConfig(stage=2, data=2, tensor=2), execution={"remat": "full"}
    ),
    "dense last": Row(model=DENSE_LAST, mesh=MeshConfig(stage=4, data=2)),
    "tensor, remat": Row(mesh=MeshConfig(stage=2, data=2, tensor=2), execution={"remat": "full"}),
    "tensor, chunks of the loss": Row(
        mesh=MeshConfig(stage=2, data=2, tensor=2), execution={"loss_chunk": 2}
    ),
    "ring, chunks of the loss": Row(
        mesh=MeshConfig(stage=2, data=2, seq=2),
        execution={"sequence_parallel": RingConfig(layout="contiguous"), "loss_chunk": 4},
    ),
    "ulysses, one micro-batch": Row(
        parts=1,
        mesh=MeshConfig(stage=4, seq=2),
        execution={"sequence_parallel": UlyssesConfig()},
    ),
    "replicas": Row(
        parts=2, mesh=MeshConfig(replica=2, stage=2, data=2), execution={"rules": "hybrid"}
    ),
    "hierarchical": Row(
        parts=2, mesh=MeshConfig(replica=2, stage=2, data=2), execution={"rules": "hierarchical"}
    ),
    "nested": Row(
        parts=2, mesh=MeshConfig(replica=2, stage=2, expert=2), execution={"rules": "nested"}
    ),
    "zero1": Row(mesh=MeshConfig(stage=4, data=2), execution={"rules": "zero1"}),
    "zero2, dense first": Row(
        model=DENSE_FIRST, mesh=MeshConfig(stage=4, data=2), execution={"rules": "zero2"}
    ),
    "two passes": Row(form="two_pass", mesh=MeshConfig(stage=4, data=2)),
    "capacity": Row(
        model=dataclasses.replace(
            FOUR, moe=dataclasses.replace(FOUR.moe, capacity=CapacityConfig(factor=1.0))
        ),
        parts=2,
        mesh=MeshConfig(stage=2, data=2, expert=2),
        execution={"dispatcher": AllToAllConfig()},
    ),
    "carried logits": Row(
        model=with_method("moe_plus_plus"),
        mesh=MeshConfig(stage=2, data=2, tensor=2),
        execution={"pipeline": InterleavedConfig(chunks=2)},
    ),
    "noise": Row(model=with_method("noisy_topk"), mesh=MeshConfig(stage=2, data=2)),
    "bias": Row(model=with_method("loss_free"), mesh=MeshConfig(stage=2, data=2)),
}


@functools.cache
def _alone(model, parts, form, skipping=None):
    return one_step.step_once(model, one_step.batch(), parts=parts, form=form, skipping=skipping)


def check_row(row):
    wanted = _alone(row.model, row.parts, row.form, row.skipping)
    execution = ExecutionConfig(mesh=row.mesh, **row.execution)
    found = one_step.step_once(
        row.model,
        one_step.batch(),
        parts=row.parts,
        form=row.form,
        execution=execution,
        skipping=row.skipping,
    )
    for name in ("loss", "losses", "load", "router_state"):
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6),
            found[name],
            wanted[name],
        )
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(wanted["gradient"]))

    def close(found, wanted):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6 * largest)

    jax.tree.map(close, found["gradient"], wanted["gradient"])


@pytest.mark.parametrize("row", FAST.values(), ids=FAST)
def test_gradients_equal_those_without_stages(row):
    check_row(row)


@pytest.mark.slow
@pytest.mark.parametrize("row", SLOW.values(), ids=SLOW)
def test_gradients_equal_those_without_stages_on_more_meshes(row):
    check_row(row)


def test_a_forward_pass_of_all_layers_is_refused_on_stages():
    execution = ExecutionConfig(mesh=MeshConfig(stage=2, data=4))
    tokens, _ = tokens_for(FOUR)
    with (
        jax.set_mesh(mesh_of(execution)),
        pytest.raises(ValueError, match=r"execution\.mesh\.stage=2 splits the layers"),
    ):
        Transformer(FOUR, execution).apply({"params": one_step.params_of(FOUR)}, tokens)


@pytest.mark.slow
@pytest.mark.rows(2)
@pytest.mark.parametrize(
    ("capacity", "parts"), [(None, 4), (CapacityConfig(factor=1.0), 1)], ids=["parts", "whole"]
)
def test_held_out_loss_equals_that_without_stages(capacity, parts):
    moe, rows = dataclasses.replace(FOUR.moe, capacity=capacity), one_step.batch()
    model = dataclasses.replace(FOUR, moe=moe)
    execution = ExecutionConfig(mesh=MeshConfig(stage=4, data=2))
    assert held_out_parts(model, execution, rows.tokens.shape[0]) == parts
    given = one_step.params_of(model), initial_router_state(model)
    wanted, weight = make_eval_step(model)(*given, rows)
    mesh = mesh_of(execution)
    with jax.set_mesh(mesh):
        placed = jax.device_put(given, jax.sharding.NamedSharding(mesh, jax.P()))
        found = make_eval_step(model, execution=execution)(*placed, global_batch(rows, mesh))
    np.testing.assert_allclose(found, (wanted, weight), rtol=1e-5)


@pytest.mark.slow
def test_routing_statistics_equal_those_without_stages():
    rows, execution = one_step.batch(), ExecutionConfig(mesh=MeshConfig(stage=2, data=4))
    given = one_step.params_of(AROUND), initial_router_state(AROUND)
    wanted = router_statistics(AROUND, ExecutionConfig(), *given, rows)
    mesh = mesh_of(execution)
    with jax.set_mesh(mesh):
        placed = jax.device_put(given, jax.sharding.NamedSharding(mesh, jax.P()))
        found = router_statistics(AROUND, execution, *placed, global_batch(rows, mesh))
    np.testing.assert_array_equal(found.counts, wanted.counts)
    np.testing.assert_allclose(found.prob_sum, wanted.prob_sum, rtol=1e-5)


@pytest.mark.parametrize(
    ("given", "accumulation", "message"),
    [
        (
            {"mesh": MeshConfig(stage=3)},
            3,
            r"the 4 equal layers of moe_blocks_0 must be divisible by execution\.mesh\.stage x"
            r" execution\.pipeline\.chunks = 3, the number of equal groups: choose a product that"
            r" divides 4",
        ),
        (
            {"mesh": MeshConfig(stage=2), "pipeline": InterleavedConfig(chunks=2)},
            3,
            r"training\.accumulation=3 must be a multiple of execution\.mesh\.stage=2",
        ),
        (
            {"mesh": MeshConfig(), "pipeline": InterleavedConfig(chunks=2)},
            4,
            r"chunks=2 cuts the layers of a stage, and execution\.mesh\.stage=1 has one",
        ),
        (
            {"mesh": MeshConfig(stage=2), "telemetry": "detailed"},
            4,
            r"execution\.telemetry=detailed compares layers of all stages",
        ),
        (
            {
                "mesh": MeshConfig(stage=2),
                "dispatcher": AllToAllConfig(token_tables="tables.npz"),
            },
            4,
            r"with token_tables moves tokens from layer to layer",
        ),
    ],
    ids=["layers", "micro-batches", "chunks alone", "telemetry", "tables"],
)
def test_what_a_pipeline_cannot_train_is_refused(given, accumulation, message):
    with pytest.raises(ValueError, match=message):
        check_pipeline(FOUR, ExecutionConfig(**given), accumulation)


def test_deferred_gradients_that_a_compiler_does_not_survive_are_refused(monkeypatch):
    monkeypatch.setattr(gradients, "platform", lambda: "tpu")
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    execution = ExecutionConfig(mesh=MeshConfig(stage=2), pipeline=DEFERRED, remat="full")
    with pytest.raises(ValueError, match="must be at least 0.11"):
        gradients.check_compiler(execution)
    gradients.check_compiler(dataclasses.replace(execution, remat="none"))
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 0))
    gradients.check_compiler(execution)
