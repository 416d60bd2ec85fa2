# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Generation with experts in slots: the tokens of `generate`, hits and loads of `replay`."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.contrib.serving_lab.caches import ITEM_CACHES, expert_uses, replay
from jaxmoe.contrib.serving_lab.expert_slots import ExpertSlots, ExpertSlotsConfig
from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.feed_forwards import ReLUSquaredConfig
from jaxmoe.layers.feed_forwards.moe.config import MoEOptions
from jaxmoe.models.decode import generate, stream
from jaxmoe.models.sampling import SamplingConfig
from jaxmoe.models.transformer import forward
from jaxmoe.routing import SoftmaxGateConfig, ZeroComputationConfig
from jaxmoe.routing.telemetry.recording import record_router, recorded_ids
from jaxmoe.routing.telemetry.trace import RoutingTrace
from tests.jaxmoe.layers.test_mesh_invariance import values_of
from tests.support.models import FULL

MODEL = dataclasses.replace(FULL, num_layers=3)
PROMPTS = [[1, 2, 3, 4], [5, 6]]
TOKENS, GREEDY = 5, SamplingConfig(temperature=0.0)


def slotted(slots, model=MODEL, sampling=GREEDY):
    """The tokens, and the store after them."""
    given = {"num_tokens": TOKENS, "key": jax.random.key(1), "sampling": sampling}
    params = jax.device_get(values_of(model))
    parts = list(stream(model, params, PROMPTS, programs=slots, at_once=3, **given))
    return np.concatenate(parts, axis=1), slots.store


@functools.cache
def whole(model=MODEL, temperature=0.0):
    """The tokens of the whole model."""
    given = {"num_tokens": TOKENS, "key": jax.random.key(1), "temperature": temperature}
    return np.asarray(generate(model, values_of(model), PROMPTS, **given))


@functools.cache
def steps():
    """Experts of the tokens of each step [L n K], by a forward pass over the whole texts."""
    rows = [[*prompt, *answer] for prompt, answer in zip(PROMPTS, whole().tolist(), strict=True)]
    ids = np.array([(row + [0] * 9)[:9] for row in rows], np.int32)
    model = dataclasses.replace(MODEL, moe=record_router(MODEL.moe, ids.size))
    output = forward(model, ExecutionConfig(), values_of(MODEL), jnp.asarray(ids))
    found = recorded_ids(output.statistics).reshape(MODEL.num_moe_layers, *ids.shape, -1)
    lengths = [len(prompt) for prompt in PROMPTS]
    first = np.concatenate([found[:, row, :n] for row, n in enumerate(lengths)], axis=1)
    later = [
        np.stack([found[:, row, n + step] for row, n in enumerate(lengths)], axis=1)
        for step in range(TOKENS - 1)
    ]
    return [first, *later]


def wanted_uses():
    """The uses of all steps."""
    parts = []
    for ids in steps():
        trace = RoutingTrace(np.zeros(ids.shape[1], np.int32), ids, MODEL.moe.num_experts)
        parts += expert_uses(trace, tokens=ids.shape[1])
    return parts


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_tokens_of_slots_are_those_of_the_whole_model(size):
    slots = ExpertSlots(size)
    found, store = slotted(slots)
    np.testing.assert_array_equal(found, whole())
    assert store.num_slots == size and store.slot_bytes == size * store.expert_bytes
    assert f"{size} expert slots, lru: " in str(slots) and "MB of experts" in str(slots)
    if size == 8:  # all experts of two layers
        assert store.loads == len({use.item for use in wanted_uses()})


@pytest.mark.parametrize("name", ["lru", "lfu", "scores"])
def test_hits_and_loads_of_slots_are_those_of_a_replay(name):
    config = ITEM_CACHES[name]()
    _, store = slotted(ExpertSlots(6, config))
    trace = wanted_uses()
    predicted = replay(trace, config, 6)
    assert store.uses == len(trace) and 0 < store.hits < store.uses
    assert (store.hits, store.loads) == (sum(predicted.hits), predicted.loads)


@pytest.mark.slow
def test_experts_without_computation_and_sampling_in_slots():
    free = ZeroComputationConfig()
    model = dataclasses.replace(MODEL, moe=dataclasses.replace(MODEL.moe, zero_computation=free))
    found, _ = slotted(ExpertSlots(2), model, SamplingConfig(temperature=0.9))
    np.testing.assert_array_equal(found, whole(model, 0.9))


def test_experts_with_biases_and_without_a_gate_in_slots():
    """The slots hold the biases, and compute the activation of the layer."""
    moe = dataclasses.replace(
        MODEL.moe, activation=ReLUSquaredConfig(), options=MoEOptions(has_expert_bias=True)
    )
    model = dataclasses.replace(MODEL, moe=moe)
    tokens, _ = slotted(ExpertSlots(2), model)
    np.testing.assert_array_equal(tokens, whole(model))


def test_scaled_inputs_are_refused_in_slots():
    moe = dataclasses.replace(MODEL.moe, gate=SoftmaxGateConfig(scales_input=True))
    model = dataclasses.replace(MODEL, moe=moe)
    with pytest.raises(
        ValueError, match="experts=slots:2: moe.gate.scales_input is true.*leave it out"
    ):
        ExpertSlots(2).begin(model, ExecutionConfig(), {}, None)


@pytest.mark.parametrize("text", ["slots", "slots:x", "window:4", "slots:4:none"])
def test_what_are_no_slots_is_refused(text):
    with pytest.raises(ValueError, match=f"experts={text} must be slots:N.* of lru, lfu, scores"):
        ExpertSlotsConfig.parse(text)


def test_policies_that_know_the_future_are_refused():
    with pytest.raises(ValueError, match="slots:4:belady needs the uses to come.*lru, lfu, scores"):
        ExpertSlotsConfig.parse("slots:4:belady")
    with pytest.raises(ValueError, match="slots:0 must have at least one slot"):
        ExpertSlotsConfig.parse("slots:0")


def test_a_model_without_experts_is_refused():
    dense = dataclasses.replace(MODEL, moe=None, dense_layers=())
    with pytest.raises(ValueError, match="no routed experts"):
        ExpertSlots(4).begin(dense, ExecutionConfig(), {}, None)
