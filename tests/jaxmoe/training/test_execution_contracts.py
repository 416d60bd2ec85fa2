# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The collectives of a compiled training step are those of the formulas.

Everything is f32 and compiled for eight CPU devices, where a reduce-scatter of the partitioner
(zero1, zero2, and the last step across replicas) is an all-reduce followed by a slice.
"""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jaxmoe.contrib.few_bits.halo import HaloConfig
from jaxmoe.data.batch import Batch
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.config import AttentionConfig, ModelConfig, MoEConfig
from jaxmoe.models.transformer import Transformer
from jaxmoe.optim import adamw
from jaxmoe.planning.hlo import collectives
from jaxmoe.precision import PrecisionPolicy
from jaxmoe.scaling.initialize import parameter_table
from jaxmoe.training.state import init_state
from jaxmoe.training.step import make_train_step
from sharding import MeshConfig, MoEMesh
from sharding.distributed import global_batch
from sharding.expert_parallel import AllToAllConfig
from tests.support.meshes import mesh_of

pytestmark = pytest.mark.slow

DENSE = ModelConfig(
    vocab_size=64,
    num_layers=4,
    embed_dim=32,
    dense_dim=96,
    moe=None,
    attention=AttentionConfig(num_heads=4, num_kv_heads=4, head_dim=8, qk_norm="none"),
)
TABLE = parameter_table(DENSE)
BATCH, LENGTH = 8, 16


def size(rows):
    return 4 * sum(row.size for row in rows)


ALL = size(TABLE)
MATRICES = size(row for row in TABLE if row.declaration.matrix)
IN_LAYERS = size(row for row in TABLE if row.declaration.matrix and "blocks" in row.path)


@functools.cache
def step_collectives(execution):
    """Compiled text of a training step with AdamW."""
    mesh, optimizer = mesh_of(execution), adamw(1e-3)
    state = init_state(DENSE, optimizer, jax.random.key(0), execution=execution, mesh=mesh)
    tokens = np.zeros((BATCH, LENGTH), np.int32)
    rows = Batch(tokens=tokens, targets=tokens, loss_weights=np.ones((BATCH, LENGTH), np.float32))
    step = make_train_step(DENSE, optimizer, execution=execution)
    with jax.set_mesh(mesh):
        return collectives(step.lower(state, global_batch(rows, mesh)).compile().as_text())


def moved(execution):
    """{(kind, devices in a group): result bytes of all executions}, groups of one left out."""
    found = collections.Counter()
    for one in step_collectives(execution):
        devices = len(one.groups[0]) if one.kind != "collective-permute" else 2
        if devices > 1:
            found[one.kind, devices] += one.result_bytes * one.trip_count
    return dict(found)


GAINS = ALL - MATRICES
SCALARS = 4096
"""Bytes of losses, norms and telemetry, which are reduced as well."""

WHOLE, REPLICAS = MeshConfig(data=8), MeshConfig(replica=2, data=4)
GATHERED = MATRICES + IN_LAYERS
"""With full rematerialisation the matrices of layers are gathered for the backward pass again."""

LAYOUTS = {
    "data_parallel": (WHOLE, {("all-reduce", 8): ALL}),
    # The moments' parts of the new parameters come back; gains are whole everywhere.
    "zero1": (WHOLE, {("all-reduce", 8): ALL, ("all-gather", 8): MATRICES}),
    "zero2": (WHOLE, {("all-reduce", 8): ALL, ("all-gather", 8): MATRICES}),
    "fully_sharded": (
        WHOLE,
        {
            ("all-reduce", 8): GAINS,
            ("all-gather", 8): GATHERED,
            ("reduce-scatter", 8): MATRICES / 8,
        },
    ),
    # Two levels: a gradient is scattered within a replica, and its piece added across replicas.
    "fully_sharded_in_replicas": (
        REPLICAS,
        {
            ("all-reduce", 8): GAINS,
            ("all-gather", 4): GATHERED,
            ("reduce-scatter", 4): MATRICES / 4,
            ("all-reduce", 2): MATRICES / 4,
        },
    ),
    # The update is cut across replicas as well, and the new parameters come back.
    "hybrid": (
        REPLICAS,
        {
            ("all-reduce", 8): GAINS,
            ("all-gather", 4): GATHERED,
            ("reduce-scatter", 4): MATRICES / 4,
            ("all-reduce", 2): MATRICES / 4,
            ("all-gather", 2): MATRICES / 4,
        },
    ),
    # Matrices of layers cross replicas once, and are gathered within one twice.
    "hierarchical": (
        REPLICAS,
        {
            ("all-reduce", 8): GAINS,
            ("all-gather", 2): IN_LAYERS / 4,
            ("all-gather", 4): 2 * IN_LAYERS,
            ("reduce-scatter", 4): IN_LAYERS / 4,
            ("all-reduce", 2): IN_LAYERS / 4,
            ("all-gather", 8): MATRICES - IN_LAYERS,
            ("reduce-scatter", 8): (MATRICES - IN_LAYERS) / 8,
        },
    ),
    # Weights are cut over pairs, all else over eight; on accelerators the last sum is scattered.
    "nested": (
        MeshConfig(replica=2, data=2, expert=2),
        {
            ("all-reduce", 8): GAINS,
            ("all-gather", 4): MATRICES / 2,
            ("all-gather", 2): GATHERED,
            ("reduce-scatter", 2): MATRICES / 2,
            ("all-reduce", 4): MATRICES / 2,
        },
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_bytes_of_the_state_are_those_of_the_formula(name):
    """Exactly; but for scalars, which are reduced over all devices, or over those of a replica."""
    mesh, wanted = LAYOUTS[name]
    rules = name.removesuffix("_in_replicas")
    found = moved(ExecutionConfig(mesh=mesh, rules=rules, remat="full"))
    reduced, least = found.pop(("all-reduce", 8)), wanted[("all-reduce", 8)]
    assert least <= reduced + SCALARS // 8 and reduced <= least + SCALARS
    # A few scalars may travel with an array.
    found = {key: size - size % 64 for key, size in found.items() if size > SCALARS // 16}
    assert found == {key: size for key, size in wanted.items() if key != ("all-reduce", 8)}


def test_products_in_few_bits_gather_codes():
    """HQ-FSDP: of the layers' matrices 1 byte per value travels, twice with rematerialisation;
    gradients are scattered as ever, and scales are numbers."""
    precision = PrecisionPolicy(matmul=HaloConfig(dtype="int8", level=2))
    found = moved(ExecutionConfig(mesh=WHOLE, remat="full", precision=precision))
    assert found.pop(("all-reduce", 8)) <= GAINS + SCALARS
    assert found == {
        ("all-gather", 8): MATRICES - IN_LAYERS + 2 * IN_LAYERS // 4,
        ("reduce-scatter", 8): MATRICES / 8,
    }


def test_no_collective_is_as_large_as_the_logits():
    """With the vocabulary cut in four the loss moves three numbers per token."""
    execution = ExecutionConfig(
        mesh=MeshConfig(data=2, tensor=4), rules="data_parallel", remat="full"
    )
    logits = 4 * BATCH // 2 * LENGTH * DENSE.vocab_size
    stream = 4 * BATCH // 2 * LENGTH * DENSE.embed_dim
    in_a_row = [one for one in step_collectives(execution) if len(one.groups[0]) == 4]
    assert stream <= max(one.result_bytes for one in in_a_row) < stream + 64 < logits


def test_tensor_parallelism_gathers_and_scatters_once_a_sublayer():
    """Per layer, of the stream: 2 all-gathers and 2 reduce-scatters forward; backward as many, and
    what rematerialisation repeats, 2 and 1 (the last sum is not needed again)."""
    execution = ExecutionConfig(
        mesh=MeshConfig(data=2, tensor=4), rules="data_parallel", remat="full"
    )
    runs = collections.Counter()
    for one in step_collectives(execution):
        if len(one.groups[0]) == 4 and one.trip_count == DENSE.num_layers:
            runs[one.kind] += one.result_bytes > SCALARS // 4
    assert runs == {"all-gather": 6, "reduce-scatter": 5, "all-reduce": 0}


SPARSE = dataclasses.replace(
    DENSE, num_layers=2, moe=MoEConfig(num_experts=8, top_k=2, expert_dim=24)
)


def forward_collectives(execution):
    """{(kind, devices in a group): executions} of what moves activations in a forward pass; token
    ids and counts of rows are smaller."""
    mesh, table = mesh_of(execution), parameter_table(SPARSE, rules=execution.axis_rules)
    params = table.tree(
        lambda row: jax.ShapeDtypeStruct(
            row.shape, jnp.float32, sharding=NamedSharding(mesh, row.spec)
        )
    )
    tokens = global_batch(np.zeros((BATCH, LENGTH), np.int32), mesh)

    def hidden(params, tokens):
        return (
            Transformer(SPARSE, execution)
            .apply({"params": params}, tokens, has_logits=False)
            .hidden
        )

    with jax.set_mesh(mesh):
        found = collectives(jax.jit(hidden).lower(params, tokens).compile().as_text())
    runs = collections.Counter()
    for one in found:
        if one.result_bytes > 1024 and (one.kind == "collective-permute" or len(one.groups[0]) > 1):
            runs[one.kind, len(one.groups[0])] += one.trip_count
    return dict(runs)


def test_nothing_is_moved_between_attention_and_folded_experts():
    """Per layer rows go to the experts and results come back, and that is all."""
    execution = ExecutionConfig(
        mesh=MeshConfig(data=8),
        rules="data_parallel",
        fold=MoEMesh(expert=4),
        dispatcher=AllToAllConfig(transport="equal"),
    )
    runs = forward_collectives(execution)
    assert runs == {("all-to-all", 4): 2 * SPARSE.num_layers}


def test_folded_experts_take_the_positions_that_tensor_parallelism_leaves():
    """Attention gathers and scatters among 4; the experts' all-to-all is among all 8."""
    execution = ExecutionConfig(
        mesh=MeshConfig(data=2, tensor=4),
        rules="data_parallel",
        fold=MoEMesh(expert=8),
        dispatcher=AllToAllConfig(transport="equal"),
    )
    runs, layers = forward_collectives(execution), SPARSE.num_layers
    assert runs == {
        ("all-gather", 4): layers,
        ("reduce-scatter", 4): layers + 1,  # the embedding's
        ("all-to-all", 8): 2 * layers,
    }


@pytest.mark.parametrize("rules", ["fully_sharded", "hierarchical"])
def test_partitioner_logs_no_involuntary_copy(rules, capfd):
    """XLA warns on standard error when it copies a whole array to change its layout."""
    mesh = MeshConfig(replica=2, data=2, tensor=2)
    step_collectives(ExecutionConfig(mesh=mesh, rules=rules, remat="full"))
    assert "full rematerialization" not in capfd.readouterr().err.lower()
