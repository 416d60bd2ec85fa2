# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Soft MoE: the sums of its weights, the layer against dense einsums, padding, meshes."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.feed_forwards.moe.layer import MoELayer
from jaxmoe.layers.records import RoutingInputs
from jaxmoe.models.config import MoEConfig
from jaxmoe.routing import (
    Extent,
    LoadBalanceConfig,
    RouterInputs,
    RouterZConfig,
    SoftmaxGateConfig,
    SoftMoEConfig,
)
from tests.support.dense_moe import swiglu
from tests.support.models import TINY
from tests.support.noncausal_models import bidirectional, loss_on_mesh, loss_on_one_device
from tests.support.tolerances import assert_close

ROWS, LENGTH, WIDTH, EXPERTS, SLOTS = 3, 7, 5, 4, 2
MASK = np.ones((ROWS, LENGTH), bool)
MASK[1, 4:] = False
MASK[2] = False  # a row of padding alone
CONFIG = SoftMoEConfig(slots_per_expert=SLOTS)
MOE = MoEConfig(
    num_experts=4,
    top_k=2,
    expert_dim=10,
    router=CONFIG,
    gate=SoftmaxGateConfig(),
    balancers=(RouterZConfig(),),
)


def route(x, mask=MASK):
    router = CONFIG.build(num_experts=EXPERTS, top_k=2, embed_dim=WIDTH)
    params, state = router.init(jax.random.key(0))
    inputs = RouterInputs(
        x=x.reshape(-1, WIDTH),
        token_mask=jnp.asarray(mask).reshape(-1),
        segment_ids=jnp.asarray(mask).reshape(-1).astype(jnp.int32),
        extent=Extent(sequence_length=x.shape[1]),
    )
    return router.route(params, state, inputs, train=True, key=None)


def drawn(seed=0):
    values = np.random.default_rng(seed).normal(size=(ROWS, LENGTH, WIDTH))
    return jnp.asarray(values, jnp.float32)


def test_weights_sum_to_1():
    """`dispatch` sums to 1 over the tokens of a slot, `combine` over the slots of a token."""
    output = route(drawn())
    slots = output.slots
    assert slots.dispatch.shape == slots.combine.shape == (ROWS, LENGTH, EXPERTS * SLOTS)
    real_rows = MASK.any(1)[:, None] * np.ones((1, EXPERTS * SLOTS))
    assert_close(slots.dispatch.sum(1), real_rows, "elementwise")
    assert_close(slots.combine.sum(2), MASK.astype(np.float32), "elementwise")
    for weights in (slots.dispatch, slots.combine):
        assert (np.asarray(weights)[~MASK] == 0.0).all() and (np.asarray(weights)[MASK] > 0).all()
    # Of the records: an expert's probability is the sum of `combine` over its slots.
    by_expert = slots.combine.reshape(-1, EXPERTS, SLOTS).sum(-1)
    assert_close(output.probs[MASK.ravel()], by_expert[MASK.ravel()], "elementwise")
    counts = output.statistics.counts
    assert counts.tolist() == [2 * SLOTS] * EXPERTS  # two rows are real


def test_padding_has_no_effect():
    x = drawn(1)
    plain = route(x)
    strange = route(jnp.where(jnp.asarray(MASK)[:, :, None], x, jnp.nan))
    for field in ("dispatch", "combine"):
        there = getattr(strange.slots, field)
        assert_close(there, getattr(plain.slots, field), "elementwise")
    assert_close(strange.statistics, plain.statistics, "elementwise")
    alone = route(x[1:2, :4], MASK[1:2, :4])
    assert_close(plain.slots.dispatch[1:2, :4], alone.slots.dispatch, "elementwise")


def test_layer_equals_four_einsums():
    model, rng = bidirectional(MOE), np.random.default_rng(2)
    width = model.embed_dim
    x = jnp.asarray(rng.normal(size=(ROWS, LENGTH, width)), jnp.float32)
    mask = jnp.asarray(MASK)
    routing = RoutingInputs(token_mask=mask, segment_ids=mask.astype(jnp.int32), router_state={})
    layer = MoELayer(MOE, model.context, ExecutionConfig(), True)
    boxed = jax.jit(layer.init)(jax.random.key(0), x, routing)["params"]
    params = jax.tree.map(
        lambda leaf: leaf.unbox(), boxed, is_leaf=lambda leaf: hasattr(leaf, "unbox")
    )
    cotangent = jnp.asarray(rng.normal(size=x.shape), jnp.float32)

    def ours(params, x):
        y, _ = layer.apply({"params": params}, x, routing)
        return jnp.sum(y * cotangent), y

    def theirs(params, x):
        z = jnp.einsum("gsd,dep->gsep", x, params["router"]["weight"])
        z = z.reshape(ROWS, LENGTH, -1)
        masked = jnp.where(mask[:, :, None], z, -1e30)
        real = mask.astype(jnp.float32)[:, :, None]
        dispatch = jax.nn.softmax(masked, axis=1) * real
        slots = jnp.einsum("gsp,gsd->gpd", dispatch, x).reshape(ROWS, EXPERTS, SLOTS, width)
        experts = params["experts"]
        of_expert = [
            swiglu(slots[:, e].reshape(-1, width), experts["gate_up"][e], experts["down"][e])
            for e in range(EXPERTS)
        ]
        outputs = jnp.stack([y.reshape(ROWS, SLOTS, width) for y in of_expert], axis=1)
        combine = jax.nn.softmax(z, axis=-1) * real
        y = jnp.einsum("gsp,gpd->gsd", combine, outputs.reshape(ROWS, -1, width))
        return jnp.sum(y * cotangent), y

    both = [
        jax.jit(jax.value_and_grad(function, argnums=(0, 1), has_aux=True))(params, x)
        for function in (ours, theirs)
    ]
    assert_close(*both, "end_to_end")


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["data4_tensor2", "replica2_data2_expert2"])
@pytest.mark.large
def test_model_is_the_same_on_every_mesh(mesh):
    assert_close(loss_on_mesh(MOE, mesh), loss_on_one_device(MOE), "end_to_end")


@pytest.mark.large
def test_rematerialisation_changes_nothing():
    recomputed = loss_on_one_device(MOE, ExecutionConfig(remat="full"))
    assert_close(recomputed, loss_on_one_device(MOE), "end_to_end")


def test_incompatible_parts_are_refused():
    text = "router.slots_per_expert=0 must be at least 1"
    with pytest.raises(ValueError, match=re.escape(text)):
        SoftMoEConfig(slots_per_expert=0)
    with pytest.raises(ValueError, match="evens the load by itself"):
        dataclasses.replace(MOE, balancers=(LoadBalanceConfig(),))
    with pytest.raises(ValueError, match=r"model\.moe\.router:soft_moe lets later tokens decide"):
        dataclasses.replace(TINY, moe=MOE)
    router = CONFIG.build(num_experts=EXPERTS, top_k=2, embed_dim=WIDTH)
    inputs = RouterInputs(
        x=jnp.ones((LENGTH, WIDTH)),
        token_mask=jnp.ones(LENGTH, bool),
        segment_ids=jnp.ones(LENGTH, jnp.int32),
        extent=Extent(sequence_length=LENGTH, sequence_axes=("seq",)),
    )
    with pytest.raises(ValueError, match="set the mesh axes seq to 1"):
        router.route(router.init(jax.random.key(0))[0], {}, inputs, train=True, key=None)
