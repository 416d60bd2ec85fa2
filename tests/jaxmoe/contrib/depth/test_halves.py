# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Layers on two halves of the rows against layers on all rows."""

import jax
import pytest
from jax.sharding import NamedSharding

from jaxmoe.contrib.depth import halves
from jaxmoe.execution import ExecutionConfig, OffloadConfig
from jaxmoe.scaling.initialize import parameter_table
from sharding import MeshConfig
from sharding.distributed import global_batch
from sharding.expert_parallel import AllToAllConfig
from tests.jaxmoe.training.test_execution_invariance import (
    batch,
    loss_and_gradients,
    on_one_device,
    values,
)
from tests.support.meshes import mesh_of
from tests.support.models import TINY, WIDE
from tests.support.tolerances import assert_close

TWO = {
    "tensor2": ExecutionConfig(mesh=MeshConfig(data=2, tensor=2), halves=2),
    "expert2_all_to_all": ExecutionConfig(
        mesh=MeshConfig(data=2, expert=2), dispatcher=AllToAllConfig(), halves=2, remat="full"
    ),
    "streamed": ExecutionConfig(
        mesh=MeshConfig(data=2),
        halves=2,
        remat="full",
        offload=OffloadConfig(parameters="host"),
    ),
}
SLOW = ("expert2_all_to_all", "streamed")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in TWO]
)
def test_halves_have_the_loss_and_gradients_of_whole_rows(name, monkeypatch):
    """The statistics of the routers and the losses of balancers too."""
    monkeypatch.setattr(halves, "LEAST_TOKENS", 1)
    execution = TWO[name]
    mesh, table = mesh_of(execution), parameter_table(WIDE, rules=execution.axis_rules)
    params = jax.device_put(values(), table.tree(lambda row: NamedSharding(mesh, row.spec)))
    with jax.set_mesh(mesh):
        result = loss_and_gradients(execution)(params, global_batch(batch(), mesh))
    assert_close(result, on_one_device(), "end_to_end")


def check(model, shape, *, has_cache=False, **fields):
    execution = ExecutionConfig(mesh=MeshConfig(data=2), halves=2, **fields)
    sizes = {"data": 2}
    halves.check_halves(model.context, execution, shape, sizes, has_cache=has_cache)


def test_rows_that_do_not_halve_are_refused():
    check(TINY, (4, 512))
    with pytest.raises(ValueError, match="6 sequences on 2 devices must be divisible by 4"):
        check(TINY, (6, 512))
    with pytest.raises(ValueError, match="the 1022 tokens .* must be at least 1024"):
        check(TINY, (4, 511))
    with pytest.raises(ValueError, match="a cache was given"):
        check(TINY, (4, 512), has_cache=True)
