# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Parts that do not go together are refused or warned of, with both fields and the way out."""

import dataclasses
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.layers.feed_forwards.moe.computation import assign
from jaxmoe.layers.observer import BriefObserver
from jaxmoe.models.config import AttentionConfig, ModelConfig, MoEConfig
from jaxmoe.routing import (
    GATES,
    METHODS,
    ROUTERS,
    CapacityConfig,
    GroupLimitConfig,
    MoEPlusPlusConfig,
    ProgressiveTopKConfig,
    RouterInputs,
    SoftmaxTopKConfig,
    ZeroComputationConfig,
)
from jaxmoe.routing.balancers import statistics_losses
from jaxmoe.routing.composition import RoutingWarning

SCALES_INPUT = GATES["softmax"](scales_input=True)

REFUSED = {
    "own gates": (
        lambda: MoEConfig(router=MoEPlusPlusConfig(), gate=GATES["sqrt"]()),
        "moe.router=moe_plus_plus defines its own gates, and moe.gate=sqrt would replace them: set"
        " moe.gate to softmax, which takes the router's scores as they are",
    ),
    "scaled inputs beside experts without computation": (
        lambda: MoEConfig(gate=SCALES_INPUT, zero_computation=ZeroComputationConfig()),
        "moe.gate.scales_input is true, and the gates of experts without computation multiply their"
        " outputs: set moe.gate.scales_input to false, or leave moe.zero_computation out",
    ),
    "schedule above K_max": (
        lambda: MoEConfig(router=ProgressiveTopKConfig(early_top_k=(4, 3)), top_k=2),
        "router.early_top_k[0]=4 exceeds top_k=2, the slots of a token: set moe.top_k to the"
        " largest of the schedule, 4",
    ),
    "more groups than there are": (
        lambda: GroupLimitConfig(num_groups=3),
        "groups.top_groups=4 must lie between 1 and groups.num_groups=3",
    ),
    "groups that do not divide": (
        lambda: MoEConfig(router=grouped(num_groups=3, top_groups=2)),
        "groups.num_groups=3 must divide num_experts=8: choose a divisor",
    ),
    "groups too small": (
        lambda: MoEConfig(router=grouped(num_groups=4, top_groups=1), top_k=3),
        "groups.top_groups=1 groups of 2 experts hold fewer than top_k=3: raise top_groups to 2 or"
        " lower top_k",
    ),
}


def grouped(**sizes):
    return SoftmaxTopKConfig(groups=GroupLimitConfig(**sizes))


@pytest.mark.parametrize("name", REFUSED)
def test_contradicting_parts_are_refused(name):
    make, text = REFUSED[name]
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        make()


WARNED = {
    "top-1 after": (
        {"top_k": 1, "router": SoftmaxTopKConfig(softmax="after"), "gate": GATES["softmax"]()},
        "moe.top_k=1 with moe.router.softmax=after: the only gate of a token is always 1",
    ),
    "top-1 renormalized": (
        {"top_k": 1, "gate": GATES["renormalized"]()},
        "moe.top_k=1 with moe.gate=renormalized: the only gate of a token is always 1",
    ),
    "top-1 in the end": (
        {"top_k": 2, "router": ProgressiveTopKConfig(), "gate": GATES["renormalized"]()},
        "moe.router.final_top_k=1 with moe.gate=renormalized: the only gate of a token is always 1",
    ),
    "balance losses of a router that learns nothing": (
        {"router": ROUTERS["hash"]()},
        "moe.balancers=load_balance, router_z: the router hash has nothing to learn",
    ),
    "capacity that cannot hold": (
        {"capacity": CapacityConfig(factor=0.5)},
        "moe.capacity.factor=0.5 is below 1: even a perfectly even load cannot be held",
    ),
}


@pytest.mark.parametrize("name", WARNED)
def test_parts_without_effect_warn(name):
    changes, text = WARNED[name]
    with pytest.warns(RoutingWarning, match=re.escape(text)):
        MoEConfig(**changes)


@pytest.mark.parametrize(
    ("capacity", "is_causal", "is_warned"),
    [
        (CapacityConfig(), True, True),
        (CapacityConfig(), False, False),
        (CapacityConfig(keep="position"), True, False),
        (CapacityConfig(factor=4.0), True, False),  # E / K: nothing is dropped
        (None, True, False),
    ],
)
def test_capacity_by_gate_warns_in_causal_models(capacity, is_causal, is_warned):
    moe, attention = MoEConfig(capacity=capacity), AttentionConfig(is_causal=is_causal)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RoutingWarning)
        ModelConfig(moe=moe, attention=attention)
    said = [str(warning.message) for warning in caught]
    assert bool(said) == is_warned
    assert all(text.startswith("moe.capacity.keep=gate in a causal model") for text in said)


@pytest.mark.parametrize("name", METHODS)
def test_methods_are_made_of_registered_parts(name):
    """And their parts go together, in a layer of a size that suits them."""
    parts = METHODS[name].parts()
    assert ROUTERS[parts["router"].name] is type(parts["router"])
    assert GATES[parts["gate"].name] is type(parts["gate"])
    assert METHODS[name].source.startswith(("arXiv ", "no paper: "))
    moe = dataclasses.replace(MoEConfig(num_experts=16, top_k=2), **parts)
    is_causal = moe.router.traits.is_causal
    ModelConfig(moe=moe, attention=AttentionConfig(is_causal=is_causal))


@pytest.mark.parametrize("name", METHODS)
def test_every_method_routes_no_tokens(name):
    """As where a caller has no request: no assignment, no loss, and finite gradients."""
    moe = dataclasses.replace(MoEConfig(num_experts=8, top_k=2), **METHODS[name].parts())
    router = moe.build_router(4)
    params, state = router.init(jax.random.key(0))
    none = jnp.zeros((0,), jnp.int32)
    inputs = RouterInputs(
        x=jnp.zeros((0, 4)),
        token_mask=none.astype(bool),
        segment_ids=none,
        previous_logits=jnp.zeros((0, router.num_experts)),
        context={"index": none, "tokens": none, "mask_ratio": none.astype(jnp.float32)},
    )

    def loss(params):
        key = jax.random.key(1)
        output = router.route(params, state, inputs, train=True, key=key)
        assignments, statistics = assign(output, inputs, moe, BriefObserver(), train=True, key=key)
        losses = statistics_losses(moe.balancers, statistics, num_free=moe.num_zero_computation)
        return sum(losses.values(), assignments.gates.sum()), statistics

    (value, statistics), gradients = jax.value_and_grad(loss, has_aux=True)(params)
    assert value == 0.0 and not statistics.counts.any()
    after = router.update(state, statistics, jnp.int32(0))
    for leaf in jax.tree.leaves((gradients, statistics, after)):
        assert np.isfinite(leaf).all()
