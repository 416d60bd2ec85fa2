# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Every indicator of detailed telemetry on several meshes against one device.

Values near zero are compared with the absolute tolerance of `end_to_end`, 1e-5 of the largest value
of the array and at least 1: correlations and cosines are quotients of sums of order 1 whose terms
cancel, so that their rounding does not shrink with them.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from jaxmoe.contrib.token_routes.least_loaded import LeastLoadedConfig
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.config import MoEConfig
from jaxmoe.routing import METHODS
from sharding import MeshConfig, MoEMesh
from sharding.expert_parallel import AllGatherConfig, AllToAllConfig
from sharding.sequence_parallel import AllGatherKVConfig
from tests.support.models import TINY
from tests.support.one_step import batch, stepped
from tests.support.tolerances import assert_close

pytestmark = pytest.mark.slow

MODELS = {
    "softmax": dataclasses.replace(TINY, moe=dataclasses.replace(TINY.moe, num_shared_experts=1)),
    "zero_computation": dataclasses.replace(
        TINY,
        moe=MoEConfig(num_experts=4, top_k=3, expert_dim=10, **METHODS["moe_plus_plus"].parts()),
    ),
}
EXECUTIONS = {
    "data": ExecutionConfig(mesh=MeshConfig(data=8)),
    "tensor": ExecutionConfig(mesh=MeshConfig(data=4, tensor=2), remat="full"),
    "tensor_all_to_all": ExecutionConfig(
        mesh=MeshConfig(data=2, expert=2, tensor=2), dispatcher=AllToAllConfig(num_chunks=2)
    ),
    "tensor_all_gather": ExecutionConfig(
        mesh=MeshConfig(expert=4, tensor=2), dispatcher=AllGatherConfig()
    ),
    "tensor_least_loaded": ExecutionConfig(
        mesh=MeshConfig(replica=2, expert=2, tensor=2),
        dispatcher=LeastLoadedConfig(borrowed=1, threshold=1.0, min_rows=1),
    ),
    "seq": ExecutionConfig(
        mesh=MeshConfig(data=4, seq=2), sequence_parallel=AllGatherKVConfig(layout="contiguous")
    ),
    "fold_tensor": ExecutionConfig(
        mesh=MeshConfig(replica=2, data=4),
        fold=MoEMesh(expert=2, expert_tensor=2),
        dispatcher=AllToAllConfig(),
    ),
}


def watched(name, execution):
    """Return indicators, telemetry and quality of one step."""
    detailed = dataclasses.replace(execution, telemetry="detailed")
    _, metrics = stepped(MODELS[name], batch(), execution=detailed)
    measures = {name: metrics.measures[name] for name in ("indicators", "quality")}
    return jax.device_get({"router": metrics.router, **measures})


@functools.cache
def on_one_device(name):
    return watched(name, ExecutionConfig(mesh=MeshConfig()))


@pytest.mark.rows(2)
@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("name", MODELS)
def test_every_indicator_is_that_of_one_device(name, execution):
    wanted = on_one_device(name)
    for indicator in ("expert_correlation", "activation_correlation", "direction_coupling"):
        assert np.isfinite(wanted["indicators"][indicator]).all(), indicator
    assert_close(watched(name, EXECUTIONS[execution]), wanted, "end_to_end")
