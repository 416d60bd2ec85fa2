# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Cost models from measured steps: a table by shape, and fitted rates."""

from __future__ import annotations

import dataclasses
import time

import pytest

from jaxmoe.contrib.fleet.timing import MeasuredSteps, Timing, measure_steps
from jaxmoe.contrib.serving_lab.simulation.measured import TableCost, fit_rates
from jaxmoe.planning.hardware import CHIPS
from jaxmoe.serve.device.config import ExecutorConfig
from jaxmoe.serve.facts import WorkPart
from jaxmoe.serve.plan import Shapes
from tests.support.simulated import COST, FACTS, arrivals, simulated

SHAPES = Shapes(singles=4, pieces=((1, 64), (2, 256)))
CONFIG = ExecutorConfig(num_pages=64, shapes=SHAPES, context_lengths=(512, 1024))


class Sleeper:
    """An executor whose time depends on the compiled shape alone."""

    def __init__(self):
        self.steps = []

    def facts(self, *, max_waiting):
        return FACTS

    def check(self, request):
        pass

    def run(self, step):
        self.steps.append(step)
        time.sleep(0.001 * (1 + 4 * len(step.pieces)))
        return {}

    def reset(self):
        pass

    def expert_load(self):
        return None


def test_every_compiled_shape_is_timed_full():
    executor = Sleeper()
    found = measure_steps(executor, CONFIG, repeats=1)
    assert [(one.pieces, one.context_length) for one in found] == [
        (pieces, length) for pieces in ((0, 0), (1, 64), (2, 256)) for length in (512, 1024)
    ]
    assert len(executor.steps) == 2 * len(found)
    for one, step in zip(found, executor.steps[::2], strict=True):
        assert SHAPES.fitting([len(work.tokens) for work in step.pieces]) == one.pieces
        ends = {work.start + len(work.tokens) for work in step.works}
        assert ends == {one.context_length} and len(step.singles) == 4
        assert max(max(work.pages) for work in step.works) == one.context_length // 16 - 1
        assert one.seconds >= 0.001 * (1 + 4 * len(step.pieces))


TABLE = [
    Timing(singles=4, pieces=pieces, context_length=length, seconds=seconds)
    for pieces, length, seconds in (
        ((0, 0), 512, 0.001),
        ((0, 0), 1024, 0.002),
        ((1, 64), 512, 0.003),
        ((1, 64), 1024, 0.004),
        ((2, 256), 1024, 0.008),
    )
]


@pytest.mark.parametrize(
    ("parts", "seconds"),
    [
        ([WorkPart(1, 10)], 0.001),
        ([WorkPart(1, 511)] * 4, 0.001),
        ([WorkPart(1, 512)], 0.002),
        ([WorkPart(1, 5), WorkPart(3, 0)], 0.003),
        ([WorkPart(64, 900)], 0.004),
        ([WorkPart(9, 0), WorkPart(200, 0)], 0.008),
        ([WorkPart(1, 5)] * 5, 0.003),  # the fifth is the end of a prompt
    ],
)
def test_a_step_takes_the_time_of_the_shape_that_holds_it(parts, seconds):
    cost = TableCost.of(SHAPES, TABLE, COST)
    assert cost.seconds(parts) == seconds
    assert cost.cost(parts).expert_bytes == COST.cost(parts).expert_bytes


def test_a_step_that_no_shape_holds_takes_the_time_of_the_formula():
    cost = TableCost.of(SHAPES, TABLE, COST)
    assert cost.seconds([WorkPart(300, 0)]) == COST.seconds([WorkPart(300, 0)])


def test_a_simulation_with_a_table_takes_its_times():
    cost = TableCost.of(SHAPES, TABLE, COST)
    facts = {"shapes": SHAPES, "max_running": 4, "max_length": 1024}
    given = arrivals(requests=6, prompt_median=40.0)
    found = simulated(
        "split_fuse", given, cost=cost, facts=facts | {"capabilities": frozenset({"pages"})}
    )
    assert len(found.sequences) == 6
    steps = sum(found.busy_seconds) / 0.001
    assert steps == pytest.approx(round(steps))  # whole milliseconds


def timed(cost):
    shapes = [((0, 0), 512), ((0, 0), 4096), ((1, 64), 512), ((1, 512), 4096), ((4, 512), 4096)]
    found = [Timing(singles=8, pieces=p, context_length=n, seconds=1.0) for p, n in shapes]
    return [dataclasses.replace(one, seconds=cost.seconds(one.parts)) for one in found]


def test_fitted_rates_are_those_that_made_the_times():
    chip = dataclasses.replace(
        CHIPS["v5e"], flops=4e13, efficiency=1.0, memory_bandwidth=3e11, reserved=0
    )
    true = dataclasses.replace(COST, chip=chip, memory_efficiency=1.0, constant=2e-3)
    fit = fit_rates(timed(true), COST)
    assert fit.error < 1e-3
    assert fit.cost.constant == pytest.approx(2e-3, rel=1e-3)
    assert fit.cost.chip.flops == pytest.approx(4e13, rel=1e-2)
    assert fit.cost.chip.memory_bandwidth == pytest.approx(3e11, rel=1e-2)


def test_the_error_is_that_of_shapes_that_were_left_out():
    times = timed(COST)
    odd = [*times[:-1], dataclasses.replace(times[-1], seconds=10 * times[-1].seconds)]
    assert fit_rates(odd, COST).error > fit_rates(times, COST).error


def test_too_few_shapes_for_a_fit_are_refused():
    with pytest.raises(ValueError, match="3 shapes were measured, and three rates need four"):
        fit_rates(TABLE[:3], COST)


def test_times_on_more_devices_are_in_proportion_until_they_are_measured():
    def table(factor):
        shapes = ((0, 0), 0.01), ((1, 64), 0.02), ((2, 256), 0.08)
        return [
            Timing(singles=4, pieces=pieces, context_length=1024, seconds=factor * seconds)
            for pieces, seconds in shapes
        ]

    tables = {1: table(1.0)}
    one = MeasuredSteps(SHAPES, tables, 1)
    single, prompt, long = [WorkPart(1, 10)] * 3, [WorkPart(1, 10), WorkPart(60)], [WorkPart(1500)]
    assert [one.seconds(parts) for parts in (single, prompt)] == [0.01, 0.02]
    assert one.seconds(long) == pytest.approx(3 * 0.08)  # pieces of 512 tokens
    two = one.on_chips(2)
    assert two.seconds(prompt) == pytest.approx(0.01)
    tables[2] = table(0.8)
    assert two.seconds(prompt) == pytest.approx(0.016) and one.seconds(prompt) == 0.02
    assert one.on_chips(4).seconds(prompt) == pytest.approx(0.008)
