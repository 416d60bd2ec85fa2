# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Plans of models whose layers differ: sums over the layers, by hand and against real shapes."""

import collections
import dataclasses

import jax
import pytest

from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.cache import initial_cache
from jaxmoe.models.config import (
    AttentionConfig,
    DenseConfig,
    LatentAttentionConfig,
    LayerConfig,
    ModelConfig,
    MoEConfig,
)
from jaxmoe.planning.memory import estimate_memory
from jaxmoe.planning.sizes import Sizes
from jaxmoe.planning.traffic import step_traffic
from jaxmoe.precision import PrecisionPolicy
from jaxmoe.routing import CapacityConfig, TokenRoundingConfig
from jaxmoe.scaling.initialize import init_params
from sharding.expert_parallel import AllToAllConfig, LocalConfig
from sharding.mesh import MeshConfig
from sharding.sequence_parallel import RingConfig
from tests.jaxmoe.planning.test_planning import plan_of

GROUPED = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=6)
LATENT = LatentAttentionConfig(num_heads=2, latent_dim=8, nope_dim=6, rope_dim=4, value_dim=6)
MOE = MoEConfig(num_experts=4, top_k=2, expert_dim=12, num_shared_experts=1)
MODEL = ModelConfig(
    vocab_size=32,
    num_layers=5,
    embed_dim=16,
    attention=GROUPED,
    moe=MOE,
    layers=(
        LayerConfig(mixer=LATENT),
        LayerConfig(feed_forward=DenseConfig(hidden_dim=12)),
    ),
    dense_layers=(0,),
    dense_dim=20,
)
"""Latent and dense of 20; then twice grouped-query and dense of 12, latent and experts."""
MESH = MeshConfig(data=2, expert=2, seq=2)


def mixed_plan(model=MODEL, mesh=MESH, **fields):
    fields |= {"sequence_parallel": RingConfig(), "dispatcher": AllToAllConfig()}
    return plan_of(model, mesh, batch_size=4, length=8, **fields)


def test_added_assignments_have_places_in_a_plan():
    """One sequence of 8 on a device, half of it each; at most 4 tokens of 2 experts from 4 each."""

    def places(capacity):
        moe = dataclasses.replace(MOE, capacity=capacity)
        sizes = Sizes.of(mixed_plan(dataclasses.replace(MODEL, moe=moe)))
        return sizes.places(moe.sizes)

    assert places(None) == places(CapacityConfig()) == 2 * (4 * 2)
    small = TokenRoundingConfig(tile=1)
    assert places(small) == places(None)
    # A tile of 2 adds one slot for each of the 4 experts, but an expert has a token once at most.
    assert places(TokenRoundingConfig(tile=2)) == 2 * min(4 * 2 + 4, 4 * 2)
    by_batch = TokenRoundingConfig(tile=4, scope="batch", rounding="stochastic")
    local = mixed_plan(dataclasses.replace(MODEL, moe=dataclasses.replace(MOE, capacity=by_batch)))
    execution = dataclasses.replace(local.execution, dispatcher=LocalConfig())
    sizes = Sizes.of(dataclasses.replace(local, execution=execution))
    assert sizes.places(sizes.stacks[-1].kind.feed_forward.sizes) == 4 * 2 + 4 * 3


def test_memory_of_mixed_layers_is_the_sum_by_hand():
    """One sequence of 8 on a device, half of it each: 4 tokens of 4 bytes."""
    memory = estimate_memory(mixed_plan(remat="dots"), "cpu")
    latent, grouped = 16 * (2 + 2 * 2) * 10, 16 * (4 + 2 * 2) * 6
    streams, dense = 5 * 2 * 16 * 16, 3 * 16 * (20 + 2 * 12)
    attention = 3 * 16 * (2 * 10 + 2) + 2 * 16 * (4 * 6 + 4)
    products = streams + 3 * latent + 2 * grouped + dense
    assert memory.saved == products + attention + 2 * 16 * 4 * 2 * 12
    # The layers with experts need most, although the other mixer has wider heads.
    assert memory.layer == 16 * (10 * 2 * 10 + 4 * 16)
    weights, rows = 2 * 3 * 16 * 12, 2 * 4 * 2
    assert memory.experts == weights * (4 + 4) + rows * (4 * 16 + 4 * 12) * 4
    # The loop over the period has the masks of both mixers.
    assert memory.masks == (2 + 4) * 8**2 * 9 / 16 / 2
    whole = estimate_memory(mixed_plan(remat="none"), "cpu").saved
    latent, grouped = 2 * latent + 16 * 2 * 10 + 16 * 2, 2 * grouped + 16 * 4 * 6 + 16 * 4
    experts = 2 * (rows * 4 * (16 + 2 * 12) + weights * 4)
    assert whole == 2 * streams + 3 * latent + 2 * grouped + dense + experts


def bytes_by_reason(model):
    found = collections.defaultdict(float)
    for one in step_traffic(mixed_plan(model, MeshConfig(expert=2, seq=2, tensor=2))):
        found[one.reason] += one.bytes
    return found


def test_traffic_of_mixed_layers_is_the_sum_over_models_of_one_layer():
    layers = [
        dataclasses.replace(MODEL, layers=(), num_layers=1, dense_layers=(), **changes)
        for changes in (
            {"attention": LATENT, "moe": None},
            {"attention": LATENT},
            {"attention": GROUPED, "moe": None, "dense_dim": 12},
        )
    ]
    one = [bytes_by_reason(model) for model in layers]
    mixed = bytes_by_reason(MODEL)
    assert mixed["attention"] and mixed["rows"] and mixed["tensor"]
    for reason in ("attention", "rows", "tokens", "tensor"):
        sums = one[0][reason] + 2 * one[1][reason] + 2 * one[2][reason]
        assert mixed[reason] == pytest.approx(sums), reason


def test_bytes_of_mixed_layers_are_those_of_the_shapes():
    def held(tree):
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))

    plan = mixed_plan(mesh=MeshConfig(data=1))
    params = jax.eval_shape(lambda: init_params(MODEL, jax.random.key(0)))
    memory = estimate_memory(plan, "cpu")
    assert memory.parameters == held(params)
    assert memory.optimizer == held(jax.eval_shape(plan.optimizer.init, params))


@pytest.mark.parametrize(
    ("model", "cache"),
    [
        (MODEL, "compute"),
        (dataclasses.replace(MODEL, layers=MODEL.layers[1:], dense_layers=()), "int4"),
    ],
)
def test_cache_bytes_of_mixed_layers_are_those_of_the_shapes(model, cache):
    execution = ExecutionConfig(precision=PrecisionPolicy(compute="float32", cache=cache))
    shapes = jax.eval_shape(lambda: initial_cache(model, execution, batch=1, length=4))
    bits = sum(leaf.size * jax.dtypes.itemsize_bits(leaf.dtype) for leaf in jax.tree.leaves(shapes))
    per_token = sum(
        stack.kind.mixer.cache_bytes_per_token(execution.precision, layers=stack.num_layers)
        for stack in model.stacks
    )
    assert 4 * per_token == bits // 8
