# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Long proofs: whole steps of routers with state, noise, carried logits or losses of their own.

One device without a mesh is the oracle; a mesh over which rows are spread, and micro-batches, give
the same losses, gradients, loads and new router state. Routers that are not causal have the same in
test_expert_choice.py and test_soft_moe.py, and `route` alone is in the contract.
"""

import dataclasses
import functools

import pytest

from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.config import MoEConfig
from jaxmoe.routing import METHODS, BipConfig, CouplingConfig, SinkhornConfig, SoftmaxTopKConfig
from sharding import MeshConfig, MoEMesh
from sharding.expert_parallel import AllToAllConfig
from tests.support.models import TINY
from tests.support.noncausal_models import loss_on_mesh, loss_on_one_device
from tests.support.one_step import batch, step_once
from tests.support.tolerances import assert_close

pytestmark = pytest.mark.slow


def method(name, **changes):
    moe = MoEConfig(num_experts=4, top_k=2, expert_dim=10)
    if METHODS[name].capacity is not None:
        capacity = METHODS[name].capacity.sized_for(rows_per_expert=4)
        changes = {"capacity": capacity, **changes}
    return dataclasses.replace(moe, **(METHODS[name].parts() | changes))


LAYERS = {
    "moe_plus_plus": method("moe_plus_plus"),
    "erc": method("erc", balancers=(CouplingConfig(coefficient=0.1),)),
    "noisy_topk": method("noisy_topk"),
    "switch": method("switch"),
    "deepseek_v3": method("deepseek_v3"),
    "quantile": method("quantile"),
    "kmeans": method("kmeans"),
    "sigma": method("sigma"),
    "bip of the batch": method("bip", router=SoftmaxTopKConfig(bias=BipConfig(scope="batch"))),
    "sinkhorn of the batch": method("sinkhorn", router=SinkhornConfig(scope="batch")),
}
BY_ROWS = [name for name in LAYERS if "of the batch" not in name]


@functools.cache
def on_one_device(name):
    return step_once(model_of(name), batch())


def model_of(name):
    return dataclasses.replace(TINY, moe=LAYERS[name])


@pytest.mark.parametrize("name", [name for name in LAYERS if name not in METHODS])
@pytest.mark.large
def test_method_is_the_same_on_a_mesh(name):
    done = step_once(model_of(name), batch(), mesh="replica2_data2_expert2")
    assert_close(done, on_one_device(name), "end_to_end")


FOLDED = ExecutionConfig(
    mesh=MeshConfig(data=4, tensor=2), fold=MoEMesh(expert=4), dispatcher=AllToAllConfig()
)
"""Positions cut in two, experts over parts of both axes, rows in an all-to-all."""


# The dual of BIP lies on the value of one of its tokens, so that rounding decides about that token;
# its arithmetic has the same on every mesh in test_biases.py.
@pytest.mark.parametrize("name", [name for name in METHODS if name != "bip"])
def test_every_method_is_the_same_on_a_folded_mesh(name):
    moe = method(name)
    if name == "soft_moe":
        with pytest.raises(ValueError, match="^model.moe.router:soft_moe mixes whole sequences"):
            loss_on_mesh(moe, execution=FOLDED)
    elif moe.router.traits.is_causal:
        model = dataclasses.replace(TINY, moe=moe)
        done = step_once(model, batch(), execution=FOLDED)
        assert_close(done, step_once(model, batch()), "end_to_end")
    else:
        assert_close(loss_on_mesh(moe, execution=FOLDED), loss_on_one_device(moe), "end_to_end")


def test_a_router_that_mixes_whole_sequences_sends_them_to_experts_elsewhere():
    execution = ExecutionConfig(mesh=MeshConfig(data=4, expert=2), dispatcher=AllToAllConfig())
    moe = method("soft_moe")
    assert_close(loss_on_mesh(moe, execution=execution), loss_on_one_device(moe), "end_to_end")


@pytest.mark.parametrize("name", BY_ROWS)
def test_method_is_the_same_in_micro_batches(name):
    """Routing by row with noise by token does not depend on the micro-batches."""
    form = "buffer" if name == "switch" else "two_pass"
    done, whole = step_once(model_of(name), batch(), parts=2, form=form), on_one_device(name)
    if name == "switch":  # its balance loss is of each micro-batch by definition
        assert_close(done["load"], whole["load"], "end_to_end")
        assert_close(done["loss"], whole["loss"], "end_to_end")
    else:
        assert_close(done, whole, "end_to_end")
