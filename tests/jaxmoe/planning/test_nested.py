# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Three levels of sharding: bytes of the collectives carried out, memory, and the best groups."""

from __future__ import annotations

import dataclasses

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from experiments.plan.page import three_levels
from jaxmoe.planning.hardware import CHIPS
from jaxmoe.planning.memory import estimate_memory
from jaxmoe.planning.nested import NestedSharding, best_nested, nested_shardings
from jaxmoe.planning.search import Candidate
from jaxmoe.planning.step_time import predict_time
from sharding.mesh import MeshConfig
from tests.jaxmoe.planning.test_planning import plan_of


def groups(devices, size, stride=1):
    """Groups of devices that are `stride` apart."""
    return [
        [base + offset + stride * i for i in range(size)]
        for base in range(0, devices, size * stride)
        for offset in range(stride)
    ]


def scatter(held, members, sent):
    """Sum the arrays of a group and cut them; each device keeps a part."""
    total = np.sum([held[one] for one in members], axis=0)
    parts = np.split(total, len(members))
    for one, part in zip(members, parts, strict=True):
        sent[one] += total.size - part.size
        held[one] = part


def gather(held, members, sent):
    """Join the parts of a group on each of its devices."""
    whole = np.concatenate([held[one] for one in members])
    for one in members:
        sent[one] += whole.size - held[one].size
    for one in members:
        held[one] = whole


def carried_out(one, devices, gradients):
    """Values that each device sends in a step, and the updated weights that it then holds."""
    size, sent = gradients.shape[1], [0] * devices
    for _ in range(2):  # weights, forward and backward
        held = {d: np.zeros(size // one.weights) for d in range(devices)}
        for members in groups(devices, one.weights):
            gather(held, members, sent)
    held = dict(enumerate(gradients))
    for members in groups(devices, one.gradients):
        scatter(held, members, sent)
    for members in groups(devices, one.state // one.gradients, one.gradients):
        scatter(held, members, sent)
    for members in groups(devices, devices // one.state, one.state):
        scatter(held, members, sent)
        gather(held, members, sent)
    updated = dict(held)
    # Back from the state to the weights, in the order of the cuts.
    for members in groups(devices, one.state // one.gradients, one.gradients):
        gather(updated, members, sent)
    inner = one.gradients // one.weights
    for first in range(0, devices, one.gradients):
        for part in range(one.weights):
            members = list(range(first + part * inner, first + (part + 1) * inner))
            gather(updated, members, sent)
    return sent, updated


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(data=st.data(), devices=st.sampled_from([2, 4, 6, 8, 12]))
def test_bytes_are_those_of_the_collectives_carried_out(data, devices):
    """The parts that the update leaves are the sums of all gradients, and every byte is counted."""
    one = data.draw(st.sampled_from(list(nested_shardings(devices))))
    gradients = np.random.default_rng(0).normal(size=(devices, 144))
    sent, updated = carried_out(one, devices, gradients)
    found = sum(one.sent(144, 2, devices).values())
    assert sent == pytest.approx([found / 2] * devices)
    whole = np.sum(gradients, axis=0)
    inner = one.gradients // one.weights
    for device, part in updated.items():
        index = device % one.gradients // inner
        np.testing.assert_allclose(part, np.split(whole, one.weights)[index])


def test_special_cases_are_the_usual_layouts():
    parameters, devices = 1e9, 16
    share = 1 - 1 / devices
    cases = {
        (16, 16, 16): 3 * share,  # ZeRO-3
        (1, 1, 16): 2 * share,  # ZeRO-1
        (1, 1, 1): 2 * share,  # copies
    }
    for (weights, gradients, state), wanted in cases.items():
        one = NestedSharding(weights=weights, gradients=gradients, state=state)
        assert sum(one.sent(parameters, 2, devices).values()) == pytest.approx(2e9 * wanted)
    copies = NestedSharding(weights=1, gradients=1, state=1)
    assert copies.memory(parameters, 2) == 16e9


def test_weights_stay_in_a_package_and_gradients_in_a_node():
    """A model of 20 billion on 384 dies: faster than ZeRO-3, and no choice that fits is faster."""
    chip, given = CHIPS["mi250x"], (20e9, 2, 384)
    best = best_nested(*given, chip, room=40e9)
    assert best is not None and best.weights <= 8 and best.gradients <= 8 < best.state
    fitting = [one for one in nested_shardings(384) if one.memory(20e9, 2) <= 40e9]
    assert best.seconds(*given, chip) == min(one.seconds(*given, chip) for one in fitting)
    zero3 = NestedSharding(weights=384, gradients=384, state=384)
    assert best.seconds(*given, chip) < zero3.seconds(*given, chip) / 2
    assert best_nested(*given, chip, room=1e8) is None


def test_a_plan_over_data_alone_prints_three_levels():
    plan = plan_of(mesh=MeshConfig(data=16), batch_size=16)
    chip = CHIPS["mi250x"]
    memory, time = estimate_memory(plan, "gpu"), predict_time(plan, chip)
    candidate = Candidate(plan=plan, time=time, memory=memory)
    best = best_nested(float(sum(row.size for row in plan.table)), 4, 16, chip, chip.available)
    assert best is not None
    groups_in_words = f"weights over {best.weights}, gradients over {best.gradients}, state"
    assert groups_in_words in three_levels(candidate, chip)
    near = dataclasses.replace(chip, domain=16)
    assert three_levels(candidate, near) == ""
    with_tensor = plan_of(mesh=MeshConfig(data=8, tensor=2), batch_size=16)
    other = Candidate(plan=with_tensor, time=time, memory=memory)
    assert three_levels(other, chip) == ""
