# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The plan of least-loaded expert parallelism: the published algorithm, and what it promises."""

import dataclasses
import functools
import math
import types
import zlib
from fractions import Fraction

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmoe.contrib.token_routes.least_loaded_plan import make_plan


def published_plan(loads, num_devices, *, factor=1.0, min_rows=1, threshold=1.3):
    """Return the parts (device, start, end) of each expert, by arXiv 2601.17111 in loops.

    The mean that the threshold looks at is that of devices.
    """
    loads = [int(load) for load in loads]
    held, total = len(loads) // num_devices, sum(loads)
    native = [sum(loads[d * held : (d + 1) * held]) for d in range(num_devices)]
    if total == 0 or Fraction(max(native) * num_devices, total) < Fraction(str(threshold)):
        return [[(e // held, 0, n)] if n else [] for e, n in enumerate(loads)]
    cap = math.ceil(Fraction(str(factor)) * total / num_devices)
    pending, assigned, parts = list(native), [0] * num_devices, [[] for _ in loads]

    def load(device):
        return assigned[device] + pending[device]

    for expert in sorted(range(len(loads)), key=lambda e: -loads[e]):
        home, start = expert // held, 0
        others = [device for device in range(num_devices) if device != home]
        pending[home] -= loads[expert]
        device, chunk = home, min(loads[expert], max(cap - load(home), 0))
        while True:
            parts[expert].append((device, start, start + chunk))
            assigned[device] += chunk
            start += chunk
            rest = loads[expert] - start
            if rest == 0:
                break
            device, chunk = min(others, key=load), rest  # unless a device has capacity
            for other in sorted(others, key=load):
                fits = min(rest, cap - load(other))
                if fits > 0 and (fits >= min_rows or fits == rest):
                    device, chunk = other, fits
                    break
    return parts


def rows_of(parts, num_devices):
    """[E P]: how many rows of each expert each device computes."""
    rows = np.zeros((len(parts), num_devices), int)
    for expert, pieces in enumerate(parts):
        for device, start, end in pieces:
            rows[expert, device] += end - start
    return rows


@functools.cache
def compiled(num_devices, slots, factor=1.0, min_rows=1, threshold=1.3, threshold_per="device"):
    return jax.jit(
        functools.partial(
            make_plan,
            num_devices=num_devices,
            slots=slots,
            capacity_factor=factor,
            min_rows=min_rows,
            threshold=threshold,
            threshold_per=threshold_per,
        )
    )


def plan_of(loads, *settings):
    """As numpy arrays; `loads` [E], or [n E] of n instances."""

    def fields(loads):
        plan = compiled(*settings)(loads)
        return {field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)}

    loads = np.asarray(loads, np.int32)
    arrays = jax.device_get((jax.jit(jax.vmap(fields)) if loads.ndim == 2 else fields)(loads))
    return types.SimpleNamespace(**arrays)


def check_whole(plan, loads):
    """Check that every row is computed once and exactly the borrowing devices have slots."""
    num_experts, num_devices = plan.rows.shape
    assert (plan.rows >= 0).all()
    assert plan.rows.sum(1).tolist() == list(loads)
    home = np.arange(num_experts) // (num_experts // num_devices)
    lent = set()
    for device in range(num_devices):
        slots = [expert for expert in plan.borrowed[device].tolist() if expert < num_experts]
        guests = np.flatnonzero((plan.rows[:, device] > 0) & (home != device)).tolist()
        assert sorted(slots) == guests
        assert plan.borrowed[device].tolist()[: len(slots)] == slots  # the empty ones are last
        lent |= set(guests)
    number = int(plan.num_lent)
    assert len(lent) == number and set(plan.lent[:number].tolist()) == lent
    assert (plan.lent[number:] == num_experts).all()


def test_plan_shares_one_hot_expert_equally():
    """Four devices of two experts; 100 rows, of which cap = 25 each, and expert 0 has 80.

    device           0      1      2      3
    own experts    80 3    3 2    2 4    3 3
    of expert 0     22     20     19     19
    """
    plan = plan_of([80, 3, 3, 2, 2, 4, 3, 3], 4, 2)
    assert plan.rows[0].tolist() == [22, 20, 19, 19]
    assert plan.rows.sum(0).tolist() == [25, 25, 25, 25]
    assert plan.borrowed.tolist() == [[8, 8], [0, 8], [0, 8], [0, 8]]
    assert plan.lent.tolist() == [0] + [8] * 7
    alone = plan_of([4000, 0, 0, 0, 0, 0, 0, 0], 8, 1)
    assert alone.rows[0].tolist() == [500] * 8


@pytest.mark.parametrize("loads", [[10] * 8, [0] * 8, [12, 8, 13, 7, 10, 10, 9, 11]])
def test_plan_of_balanced_devices_lends_nothing(loads):
    plan = plan_of(loads, 4, 2)
    check_whole(plan, loads)
    assert plan.num_lent == 0


def test_plan_threshold_per_device_or_expert():
    """Largest load over the mean: of devices 30 / 22.5 = 1.33, of experts 30 / 11.25 = 2.67."""
    loads = [30, 0, 10, 10, 10, 10, 10, 10]

    def num_lent(threshold, threshold_per):
        return int(plan_of(loads, 4, 2, 1.0, 1, threshold, threshold_per).num_lent)

    assert [num_lent(threshold, "device") for threshold in (1.3, 1.4)] == [1, 0]
    assert [num_lent(threshold, "expert") for threshold in (1.4, 2.7)] == [1, 0]


@hypothesis.settings(max_examples=40)
@given(
    st.lists(st.integers(0, 60), min_size=8, max_size=8),
    st.sampled_from([(2, 1, 1.0), (4, 1, 1.1), (8, 7, 1.0), (4, 40, 1.25)]),
)
def test_plan_with_enough_slots_is_the_published_one(loads, settings):
    num_devices, min_rows, factor = settings
    plan = plan_of(loads, num_devices, 8, factor, min_rows)
    check_whole(plan, loads)
    wanted = published_plan(loads, num_devices, factor=factor, min_rows=min_rows)
    assert plan.rows.tolist() == rows_of(wanted, num_devices).tolist()


def test_plan_cap_is_exact_beyond_float32():
    """Beyond 2^24 rows neighbouring integers are one float: 50000001 rows on each of 8 devices
    but one, which has 3 more, are within a cap of 50000002."""
    loads = np.full(8, 50000001)
    loads[5] += 3
    plan = plan_of(loads, 8, 1, 1.0, 1, 1.0)
    assert plan.rows.sum(0).max() == 50000002
    check_whole(plan, loads)


MORE_SETTINGS = ((4, 16, 1), (8, 16, 50), (4, 1, 1), (8, 1, 1))


@pytest.mark.parametrize(
    ("num_devices", "slots", "min_rows"),
    [
        (2, 16, 1),
        (4, 16, 50),
        (8, 16, 1),
        (8, 2, 50),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE_SETTINGS),
    ],
)
def test_plan_keeps_the_bound_on_random_loads(request, num_devices, slots, min_rows):
    """With slots enough no device has more than cap + (P - 2)(m - 1) rows; with fewer, none has
    more than that unless its own experts brought them, and nothing is lost or lent in vain.

    Each case is 125 instances, from nearly even to nearly all rows on one of 16 experts.
    """
    numbers = np.random.default_rng(zlib.crc32(request.node.name.encode()))
    evenness = numbers.choice([0.05, 0.3, 2.0], 125)
    shares = [numbers.dirichlet(np.full(16, alpha)) for alpha in evenness]
    loads = np.asarray(
        [numbers.multinomial(numbers.integers(1, 4000), p) for p in shares], np.int32
    )
    plans = vars(plan_of(loads, num_devices, slots, 1.0, min_rows, 1.0))
    for instance, ours in enumerate(loads):
        plan = types.SimpleNamespace(**{name: plans[name][instance] for name in plans})
        check_whole(plan, ours)
        bound = -(-int(ours.sum()) // num_devices) + (num_devices - 2) * (min_rows - 1)
        native = ours.reshape(num_devices, -1).sum(1)
        allowed = np.maximum(native, bound) if slots < 16 else bound
        assert (plan.rows.sum(0) <= allowed).all(), (ours.tolist(), plan.rows.sum(0))
