# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Serving on meshes of CPU devices: the tokens of one device."""

import math

import jax
import pytest
from jax.sharding import NamedSharding

from jaxmoe.execution import ExecutionConfig
from jaxmoe.scaling.initialize import parameter_table
from jaxmoe.serve import Sampling
from jaxmoe.serve.device.executor import ModelExecutor
from sharding import MeshConfig, make_mesh
from tests.support.serving import MODEL, SIZES, check_answers, params, serve

REQUESTS = {
    id_: ((3, 1, 4, 1, 5, 9, 2)[: 2 + id_], Sampling(max_tokens=6, temperature=1.0, seed=id_))
    for id_ in range(4)
}


@pytest.mark.slow
@pytest.mark.rows(2)
@pytest.mark.parametrize(
    "sizes", [{"tensor": 2}, {"expert": 2}, {"expert": 2, "tensor": 2}], ids=str
)
def test_tokens_on_a_mesh_are_those_of_one_device(sizes):
    config = MeshConfig(**sizes)
    mesh = make_mesh(config, jax.devices()[: math.prod(config.sizes)])
    execution = ExecutionConfig(mesh=config)
    table = parameter_table(MODEL, rules=execution.axis_rules)
    spread = jax.device_put(params(), table.tree(lambda row: NamedSharding(mesh, row.spec)))
    served = ModelExecutor(MODEL, spread, config=SIZES, execution=execution, mesh=mesh)
    found = serve(REQUESTS, {0: 0, 1: 0, 2: 2, 3: 5}, run=served.run)
    check_answers(REQUESTS, found.answers)
