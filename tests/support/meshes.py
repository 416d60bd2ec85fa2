# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The table of meshes on which every loss must agree.

To add a mesh: a row in MESHES. Its sizes must divide the small models of tests/support/models.py:
8 sequences, width 16, 4 heads, 2 key and value heads, 4 experts. Executions are run with WIDE; its
rows divide by seq x tensor, and in zigzag order by twice seq.
"""

import functools
import math

import jax
from jax.sharding import Mesh

from jaxmoe.contrib.token_routes.least_loaded import LeastLoadedConfig
from jaxmoe.execution import ExecutionConfig, KernelsConfig
from sharding import MeshConfig, MoEMesh, make_mesh
from sharding.expert_parallel import AllGatherConfig, AllToAllConfig
from sharding.products.collective import RingProductsConfig
from sharding.sequence_parallel import (
    AllGatherKVConfig,
    RingConfig,
    TokenRingConfig,
    UlyssesConfig,
    UlyssesRingConfig,
)

MESHES = {
    "one": MeshConfig(),
    "data2": MeshConfig(data=2),
    "data8": MeshConfig(data=8),
    "data4_tensor2": MeshConfig(data=4, tensor=2),
    "replica2_data2_expert2": MeshConfig(replica=2, data=2, expert=2),
}

LAYOUTS = [
    ("one", "fully_sharded"),
    ("data2", "zero1"),
    ("data8", "data_parallel"),
    ("data8", "fully_sharded"),
    ("data4_tensor2", "fully_sharded"),
    ("data4_tensor2", "zero2"),
    ("replica2_data2_expert2", "data_parallel"),
    ("replica2_data2_expert2", "hybrid"),
    ("replica2_data2_expert2", "hierarchical"),
    ("replica2_data2_expert2", "nested"),
]
"""Pairs of a mesh and a state layout, for `pytest.mark.parametrize`: every mesh and every layout is
in at least one."""


@functools.cache
def mesh_named(name: str) -> Mesh:
    """Return the mesh of this row, on the first of the eight devices."""
    config = MESHES[name]
    return make_mesh(config, jax.devices()[: math.prod(config.sizes)])


EXECUTIONS = {
    "tensor4": ExecutionConfig(mesh=MeshConfig(data=2, tensor=4)),
    "tensor4_ring_of_products": ExecutionConfig(
        mesh=MeshConfig(data=2, tensor=4), tensor_products=RingProductsConfig()
    ),
    "seq2_tensor2_ring_of_products": ExecutionConfig(
        mesh=MeshConfig(data=2, seq=2, tensor=2),
        sequence_parallel=AllGatherKVConfig(),
        tensor_products=RingProductsConfig(),
    ),
    "expert8": ExecutionConfig(mesh=MeshConfig(expert=8)),
    "data2_expert4": ExecutionConfig(mesh=MeshConfig(data=2, expert=4)),
    "data2_expert2_tensor2": ExecutionConfig(mesh=MeshConfig(data=2, expert=2, tensor=2)),
    "fold_expert8": ExecutionConfig(mesh=MeshConfig(data=2, tensor=4), fold=MoEMesh(expert=8)),
    "fold_expert4": ExecutionConfig(mesh=MeshConfig(data=8), fold=MoEMesh(expert=4)),
    "fold_expert4_tensor": ExecutionConfig(
        mesh=MeshConfig(data=4, tensor=2), fold=MoEMesh(expert=4)
    ),
    "fold_expert2_tensor2": ExecutionConfig(
        mesh=MeshConfig(replica=2, data=4), fold=MoEMesh(expert=2, expert_tensor=2)
    ),
    "expert8_all_gather": ExecutionConfig(mesh=MeshConfig(expert=8), dispatcher=AllGatherConfig()),
    "expert8_all_gather_indexed": ExecutionConfig(
        mesh=MeshConfig(expert=8),
        dispatcher=AllGatherConfig(),
        kernels=KernelsConfig(expert_rows="indexed"),
    ),
    "data8_local_indexed": ExecutionConfig(
        mesh=MeshConfig(data=8), kernels=KernelsConfig(expert_rows="indexed")
    ),
    "expert8_all_to_all": ExecutionConfig(mesh=MeshConfig(expert=8), dispatcher=AllToAllConfig()),
    "data2_expert4_chunks": ExecutionConfig(
        mesh=MeshConfig(data=2, expert=4), dispatcher=AllToAllConfig(num_chunks=2)
    ),
    "data2_expert2_tensor2_all_to_all": ExecutionConfig(
        mesh=MeshConfig(data=2, expert=2, tensor=2), dispatcher=AllToAllConfig()
    ),
    "fold_expert8_all_to_all": ExecutionConfig(
        mesh=MeshConfig(data=2, tensor=4), fold=MoEMesh(expert=8), dispatcher=AllToAllConfig()
    ),
    "fold_expert4_tensor_all_gather": ExecutionConfig(
        mesh=MeshConfig(data=4, tensor=2), fold=MoEMesh(expert=4), dispatcher=AllGatherConfig()
    ),
    "fold_expert2_tensor2_all_to_all": ExecutionConfig(
        mesh=MeshConfig(replica=2, data=4),
        fold=MoEMesh(expert=2, expert_tensor=2),
        dispatcher=AllToAllConfig(),
    ),
    "data2_expert4_least_loaded": ExecutionConfig(
        mesh=MeshConfig(data=2, expert=4),
        dispatcher=LeastLoadedConfig(borrowed=2, threshold=1.0, min_rows=1),
    ),
    "fold_expert4_tensor_least_loaded": ExecutionConfig(
        mesh=MeshConfig(data=4, tensor=2),
        fold=MoEMesh(expert=4),
        dispatcher=LeastLoadedConfig(borrowed=1, threshold=1.0, min_rows=1),
    ),
    "seq2_all_gather": ExecutionConfig(
        mesh=MeshConfig(data=4, seq=2), sequence_parallel=AllGatherKVConfig()
    ),
    "seq4_ulysses": ExecutionConfig(
        mesh=MeshConfig(data=2, seq=4), sequence_parallel=UlyssesConfig()
    ),
    "seq2_tensor2_all_gather": ExecutionConfig(
        mesh=MeshConfig(data=2, seq=2, tensor=2), sequence_parallel=AllGatherKVConfig()
    ),
    "seq2_expert2_tensor2_ulysses": ExecutionConfig(
        mesh=MeshConfig(expert=2, seq=2, tensor=2),
        sequence_parallel=UlyssesConfig(),
        dispatcher=AllToAllConfig(),
    ),
    "seq2_ulysses_chunks": ExecutionConfig(
        mesh=MeshConfig(data=2, seq=2), sequence_parallel=UlyssesConfig(num_chunks=2)
    ),
    "seq4_fold_expert8_all_gather": ExecutionConfig(
        mesh=MeshConfig(data=2, seq=4),
        fold=MoEMesh(expert=8),
        sequence_parallel=AllGatherKVConfig(),
        dispatcher=AllToAllConfig(),
    ),
    "seq4_fold_expert2_all_gather": ExecutionConfig(
        mesh=MeshConfig(seq=4, tensor=2),
        fold=MoEMesh(expert=2, expert_tensor=2),
        sequence_parallel=AllGatherKVConfig(layout="contiguous"),
        dispatcher=AllToAllConfig(),
    ),
    "seq4_token_ring": ExecutionConfig(
        mesh=MeshConfig(data=2, seq=4), sequence_parallel=TokenRingConfig()
    ),
    "seq2_tensor2_token_ring_by_document": ExecutionConfig(
        mesh=MeshConfig(data=2, seq=2, tensor=2),
        sequence_parallel=TokenRingConfig(layout="document_zigzag", form="co_travelling"),
    ),
    "seq4_ring": ExecutionConfig(mesh=MeshConfig(data=2, seq=4), sequence_parallel=RingConfig()),
    "seq2_tensor2_ring_by_document": ExecutionConfig(
        mesh=MeshConfig(data=2, seq=2, tensor=2),
        sequence_parallel=RingConfig(layout="document_zigzag", directions="both"),
    ),
    "seq2_expert4_ring_contiguous": ExecutionConfig(
        mesh=MeshConfig(expert=4, seq=2),
        sequence_parallel=RingConfig(layout="contiguous"),
        dispatcher=AllToAllConfig(),
    ),
    "seq4_usp": ExecutionConfig(
        mesh=MeshConfig(data=2, seq=4),
        fold=MoEMesh(seq_inner=2),
        sequence_parallel=UlyssesRingConfig(),
    ),
    "seq4_usp_fold_expert8": ExecutionConfig(
        mesh=MeshConfig(data=2, seq=4),
        fold=MoEMesh(expert=8, seq_inner=2),
        sequence_parallel=UlyssesRingConfig(layout="document_zigzag"),
        dispatcher=AllToAllConfig(),
    ),
    "fold_expert2_tensor2_all_gather": ExecutionConfig(
        mesh=MeshConfig(replica=2, data=4),
        fold=MoEMesh(expert=2, expert_tensor=2),
        dispatcher=AllGatherConfig(),
    ),
}
"""Further meshes, for the model WIDE: see tests/jaxmoe/training/test_execution_invariance.py."""

IN_SHORT = ("fold_expert2_tensor2_all_to_all",)
"""Executions that run in the short selection."""


def mesh_of(execution: ExecutionConfig) -> Mesh:
    """Return the mesh of an execution, on the first of the eight devices."""
    devices = jax.devices()[: math.prod(execution.mesh.sizes)]
    return make_mesh(execution.mesh, devices, fold=execution.mesh_fold)
