# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Instances of a served model on groups of devices."""

import re

import jax
import pytest

from jaxmoe.contrib.fleet.config import FleetConfig
from jaxmoe.contrib.fleet.dispatch import DistServeConfig
from jaxmoe.contrib.fleet.engine import FleetEngine
from jaxmoe.contrib.fleet.instances import device_groups, executors_on
from jaxmoe.serve.config import EngineConfig
from jaxmoe.serve.policies.batching import SplitFuseConfig
from jaxmoe.serve.requests import Sampling
from sharding import MeshConfig
from tests.support.serving import MODEL, PLAIN, SIZES, check_answers, params

PAIR = MeshConfig(expert=2)


def test_instances_have_devices_of_their_own_or_share_those_of_one():
    devices = [object() for _ in range(5)]
    assert device_groups(1, PAIR, devices) == [devices]
    assert device_groups(2, None, devices) == [devices[:1], devices[1:2]]
    assert device_groups(2, PAIR, devices) == [devices[:2], devices[2:4]]
    assert device_groups(3, PAIR, devices[:3]) == [devices[:2]] * 3
    assert device_groups(2, None, devices[:1]) == [devices[:1]] * 2
    message = "engine.instances=3 x 2 devices (run.mesh) need 6 devices, there are 5"
    with pytest.raises(ValueError, match=re.escape(message)):
        device_groups(3, PAIR, devices)
    with pytest.raises(ValueError, match="of which one is -1"):
        device_groups(2, MeshConfig(expert=-1), devices)


def test_instances_on_one_device_have_its_weights_once():
    groups, given = [jax.devices()[1:2]] * 2, {"config": SIZES, "execution": PLAIN, "mesh": None}
    first, second = executors_on(groups, MODEL, params(), None, **given)
    assert jax.tree.leaves(first.params)[0].devices() == {jax.devices()[1]}
    pairs = zip(jax.tree.leaves(first.params), jax.tree.leaves(second.params), strict=True)
    assert all(one.unsafe_buffer_pointer() == two.unsafe_buffer_pointer() for one, two in pairs)


@pytest.mark.slow
@pytest.mark.rows(1)
@pytest.mark.parametrize("mesh", [PAIR, None])
def test_tokens_of_instances_on_disjoint_devices_are_those_of_one(mesh):
    groups = device_groups(2, mesh)
    given = {"config": SIZES, "execution": PLAIN, "mesh": mesh}
    executors = executors_on(groups, MODEL, params(), None, **given)
    for devices, one in zip(groups, executors, strict=True):
        on = {device for leaf in jax.tree.leaves(one._pools) for device in leaf.devices()}
        assert on == set(devices)
    asked = {
        id_: (tuple(range(id_ + 1, 2 * id_ + 4)), Sampling(max_tokens=9, temperature=1.0, seed=id_))
        for id_ in range(4)
    }
    config = EngineConfig(batching=SplitFuseConfig(budget=8))
    with FleetEngine(executors, config, fleet=FleetConfig(dispatch=DistServeConfig())) as engine:
        streams = {id_: engine.submit(*one) for id_, one in asked.items()}
        found = {id_: [one.token for one in [*stream][:-1]] for id_, stream in streams.items()}
        assert engine.drain(timeout=60)
        first, second = engine.instance_metrics
    check_answers(asked, found)
    assert first.num_moved == 4 and second.num_ended == {"length": 4}
    assert first.pages_moved > 0
