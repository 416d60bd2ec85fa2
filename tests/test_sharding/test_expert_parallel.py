# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Every way to the experts gives what a loop over experts gives, in value and in every gradient."""

import dataclasses
import functools
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, PartitionSpec

from pallas_kernels import grouped_swiglu
from sharding.assignments import Assignments
from sharding.expert_parallel import (
    AllGatherConfig,
    AllToAllConfig,
    AllToAllDroppingConfig,
    DispatcherConfig,
    ExpertAxes,
    LocalConfig,
    expert_parallel,
    transport,
)
from sharding.expert_parallel.all_to_all_dropping import first_of_each_device
from sharding.expert_parallel.permute import move_rows, permute_rows
from sharding.expert_parallel.transport import TransportChoice, choose_transport, exchange
from tests.support import ragged
from tests.support.dense_moe import swiglu
from tests.support.tolerances import assert_close

T, K, E, D, F = 32, 3, 8, 4, 6  # tokens of all devices

# Sizes by axis, and where experts lie; tokens are spread over all axes of the mesh.
LAYOUTS = {
    "expert2": ({"data": 4, "expert": 2}, ExpertAxes(expert=("expert",))),
    "expert4": ({"expert": 4}, ExpertAxes(expert=("expert",))),
    "expert8": ({"expert": 8}, ExpertAxes(expert=("expert",))),
    "expert2x2": ({"a": 2, "b": 2}, ExpertAxes(expert=("a", "b"))),
    "expert2x2_reversed": ({"a": 2, "b": 2, "c": 2}, ExpertAxes(expert=("c", "a"))),
    "expert4_tensor2": (
        {"expert": 4, "etp": 2},
        ExpertAxes(expert=("expert",), expert_tensor=("etp",)),
    ),
    "tensor2": ({"data": 2, "etp": 2}, ExpertAxes(expert_tensor=("etp",))),
}
CONFIGS = {
    "all_gather": AllGatherConfig(),
    "equal": AllToAllConfig(transport="equal"),
    "ragged": AllToAllConfig(transport="ragged"),
    "chunks": AllToAllConfig(num_chunks=2),
    "dropping_roomy": AllToAllDroppingConfig(capacity_factor=8.0),
    "dropping_roomy_ragged": AllToAllDroppingConfig(capacity_factor=8.0, transport="ragged"),
}
ROUTINGS = ("even", "one_expert", "few_experts", "empty_slots")


@pytest.fixture(autouse=True)
def ragged_on_the_cpu(monkeypatch):
    """The plain version in place of the primitive, and as one that runs here."""

    def choose(requested=None):
        return TransportChoice(transport=requested or "equal", reason="this is a test")

    monkeypatch.setattr(jax.lax, "ragged_all_to_all", ragged.ragged_all_to_all)
    monkeypatch.setattr(transport, "choose_transport", choose)


def routed(routing):
    """Experts and gates [T K]; a token's experts differ."""
    random = np.random.default_rng(ROUTINGS.index(routing))
    expert_ids = np.argsort(random.random((T, E)), 1)[:, :K].astype(np.int32)
    gates = random.uniform(0.5, 1.5, (T, K)).astype(np.float32)
    if routing == "one_expert":
        expert_ids[:] = [E, E - 2, E]
    if routing == "few_experts":  # on one device of each layout, and full to the worst case
        expert_ids[:] = np.argsort(random.random((T, K)), 1) + E - K
    if routing == "empty_slots":
        expert_ids[random.random((T, K)) < 0.4] = E
        expert_ids[:5] = E
    return expert_ids, np.where(expert_ids < E, gates, np.float32(0))


@functools.cache
def tensors():
    """x, weights, and what the outputs are multiplied by to make a loss."""
    keys = jax.random.split(jax.random.key(7), 4)
    x, cotangent = jax.random.normal(keys[0], (2, T, D))
    gate_up = jax.random.normal(keys[1], (E, D, 2, F)) / 2
    return x, {"gate_up": gate_up, "down": jax.random.normal(keys[2], (E, F, D)) / 2}, cotangent


def oracle(x, gates, weights, expert_ids):
    """Every token through every expert."""
    y = jnp.zeros_like(x)
    for expert in range(weights["down"].shape[0]):
        gate = jnp.where(expert_ids == expert, gates, 0.0).sum(1)
        y += gate[:, None] * swiglu(x, weights["gate_up"][expert], weights["down"][expert])
    return y


def experts(weights, rows, group_sizes):
    return grouped_swiglu(rows, weights["gate_up"], weights["down"], group_sizes)


def mesh_of(layout):
    sizes, axes = LAYOUTS[layout]
    shape = tuple(sizes.values())
    mesh = jax.make_mesh(
        shape,
        tuple(sizes),
        axis_types=(AxisType.Auto,) * len(shape),
        devices=jax.devices()[: np.prod(shape)],
    )
    return mesh, axes


def on_mesh(layout, config, *, order=None):
    """(x, gates, weights, expert_ids) -> y, dropped [devices E], on the mesh.

    Args:
        layout: a row of LAYOUTS.
        config: of the dispatcher.
        order: of the slots of one device, so that they are not token-major.
    """
    mesh, axes = mesh_of(layout)
    tokens = PartitionSpec(tuple(mesh.axis_names))
    spread = axes.expert if config.spreads_experts and axes.expert else None
    hidden = axes.expert_tensor or None
    specs = {
        "gate_up": PartitionSpec(spread, None, None, hidden),
        "down": PartitionSpec(spread, hidden, None),
    }

    def local(x, gates, weights, expert_ids):
        top_k = gates.shape[1]
        token_ids = jnp.repeat(jnp.arange(x.shape[0], dtype=jnp.int32), top_k)
        slots = slice(None) if order is None else jnp.asarray(order)
        assignments = Assignments(
            token_ids=token_ids[slots],
            expert_ids=expert_ids.reshape(-1)[slots],
            gates=gates.reshape(-1)[slots],
            top_k=top_k if order is None else None,
        )
        y, dropped = expert_parallel(
            x, assignments, experts, weights, num_experts=E, config=config, axes=axes
        )
        return y, dropped[None]

    given = (tokens, tokens, specs, tokens)
    return jax.shard_map(local, mesh=mesh, in_specs=given, out_specs=(tokens, tokens))


def with_gradients(function, cotangent):
    """jit of (x, gates, weights, ids) -> value, dropped, gradients of x, gates and weights."""

    def loss(x, gates, weights, expert_ids):
        y, dropped = function(x, gates, weights, expert_ids)
        return jnp.sum(y * cotangent), (y, dropped)

    def run(*arguments):
        (_, outputs), gradients = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(*arguments)
        return outputs, gradients

    return jax.jit(run)


@functools.cache
def wanted():
    x, weights, cotangent = tensors()

    def plain(x, gates, weights, expert_ids):
        return oracle(x, gates, weights, expert_ids), jnp.float32(0)

    return with_gradients(plain, cotangent)


def check(function, routings):
    x, weights, cotangent = tensors()
    run = with_gradients(function, cotangent)
    for routing in routings:
        expert_ids, gates = routed(routing)
        (y, dropped), gradients = run(x, gates, weights, expert_ids)
        (y_wanted, _), gradients_wanted = wanted()(x, gates, weights, expert_ids)
        assert_close((y, gradients), (y_wanted, gradients_wanted), "matmul")
        assert not dropped.any()


QUICK = {
    *(("expert2", "all_gather"), ("expert8", "all_gather"), ("expert4_tensor2", "all_gather")),
    *(("expert2", "equal"), ("expert2x2_reversed", "equal"), ("expert4_tensor2", "chunks")),
    *(("expert8", "ragged"), ("expert2x2", "ragged"), ("expert4", "dropping_roomy_ragged")),
    *(("tensor2", "equal"),),
}


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        pytest.param(layout, name, marks=[] if (layout, name) in QUICK else pytest.mark.slow)
        for layout in LAYOUTS
        for name in CONFIGS
    ],
)
def test_equals_a_loop_over_experts(layout, name):
    check(on_mesh(layout, CONFIGS[name]), ROUTINGS)
