# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The memory policy against all combinations of its choices."""

import itertools

import hypothesis
import pytest
from hypothesis import strategies as st

from jaxmoe.execution import OffloadConfig
from jaxmoe.planning.hardware import CHIPS
from jaxmoe.planning.search.memory_policy import MemoryChoice, cheapest, choices_of, policy_fields
from tests.jaxmoe.planning.test_planning import WIDE, plan_of

CHOICES = st.tuples(st.integers(0, 9), st.integers(0, 9))


@hypothesis.given(
    st.lists(st.lists(CHOICES, min_size=1, max_size=4), min_size=1, max_size=4),
    st.integers(0, 30),
)
def test_the_policy_is_the_cheapest_of_all_combinations(pairs, needed):
    groups = [[MemoryChoice(freed=f, seconds=s) for f, s in choices] for choices in pairs]
    costs = [
        sum(one.seconds for one in taken)
        for taken in itertools.product(*groups)
        if sum(one.freed for one in taken) >= needed
    ]
    found = cheapest(groups, needed)
    if not costs:
        assert found is None
        return
    assert found is not None and sum(one.freed for one in found) >= needed
    assert sum(one.seconds for one in found) == min(costs)


def test_the_policy_moves_no_more_than_is_needed():
    plan, chip = plan_of(WIDE, batch_size=8, length=64, remat="full"), CHIPS["v5e"]
    held, inputs = choices_of(plan, chip)
    assert policy_fields(plan, chip, 0.0) == {}
    assert policy_fields(plan, chip, inputs[1].freed) == {"remat": "offload"}
    moments = policy_fields(plan, chip, held[1].freed)
    assert moments == {"offload": OffloadConfig(parts=8)}
    most = policy_fields(plan, chip, held[2].freed)
    assert most is not None and most["offload"].parameters == "host"
    assert policy_fields(plan, chip, 10.0 * held[2].freed) is None
    assert held[1].seconds == pytest.approx(held[1].freed / (5 / 8) * 2 / chip.host_bandwidth)
