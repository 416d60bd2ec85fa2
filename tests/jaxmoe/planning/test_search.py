# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The search over meshes and arrangements equals brute force, and says why others lost."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math

import pytest

from jaxmoe.planning.abstract_step import StepPlan
from jaxmoe.planning.device_layout import DeviceLayout, TokenFlops
from jaxmoe.planning.hardware import CHIPS
from jaxmoe.planning.memory import estimate_memory, least_memory
from jaxmoe.planning.search import (
    EVERYTHING,
    Space,
    best_first,
    enumerate_meshes,
    on_mesh,
    search,
)
from jaxmoe.planning.search.bounds import ParameterSeconds
from jaxmoe.planning.search.space import Arrangement, arrangements
from jaxmoe.planning.search.verdicts import plan_in_words, why_not
from jaxmoe.planning.sizes import Sizes
from jaxmoe.planning.step_time import least_time, predict_time, time_of
from sharding.expert_parallel import AllToAllConfig, LocalConfig
from sharding.fold import MoEMesh
from sharding.mesh import MeshConfig
from sharding.pipeline import GPipeConfig, InterleavedConfig
from tests.jaxmoe.planning.test_planning import WIDE, plan_of

MESHES = (
    MeshConfig(data=8),
    MeshConfig(data=4, tensor=2),
    MeshConfig(data=4, expert=2),
    MeshConfig(replica=2, data=4),
    MeshConfig(stage=2, data=4),
)
SPACE = Space(
    rules=("fully_sharded", "zero2", "hybrid"),
    dispatchers=(LocalConfig(), AllToAllConfig()),
    pipelines=(InterleavedConfig(), InterleavedConfig(chunks=2)),
    remats=("none", "dots", "kernels", "attention", "full"),
    has_folds=True,
    has_micro_batches=True,
)
MODEL = dataclasses.replace(WIDE, num_layers=4)


def _all_of(plan, mesh):
    """Every plan of a mesh by the rules of `Space`, by its arrangement, written again and plain."""
    found = {}
    folds = [None, MoEMesh(expert=2), MoEMesh(expert=4), MoEMesh(expert=8)]
    for rule, dispatcher, fold, pipeline, remat, number in itertools.product(
        SPACE.rules, SPACE.dispatchers, folds, SPACE.pipelines, SPACE.remats, (1, 2, 4, 8)
    ):
        if (rule == "hybrid" and mesh.replica == 1) or (pipeline.chunks > 1 and mesh.stage == 1):
            continue
        if fold is not None and (mesh.tensor == 1 or mesh.expert > 1):
            continue
        if dispatcher.traits.spreads_experts != (mesh.expert > 1 or fold is not None):
            continue
        if 32 % (number * mesh.batch_shards):
            continue
        execution = dataclasses.replace(
            plan.execution, rules=rule, dispatcher=dispatcher, pipeline=pipeline, remat=remat
        )
        own = dataclasses.replace(plan, execution=execution, accumulation=number)
        try:
            own = on_mesh(own, mesh, fold)
        except ValueError:
            continue
        key = (mesh, rule, dispatcher.name, fold, pipeline.chunks)
        found.setdefault(key, []).append(own)
    return found


FEW = (MeshConfig(stage=2, data=4),)


@functools.cache
def priced(meshes):
    """Arrangement: (seconds, bytes) of each of its plans."""
    plan = plan_of(MODEL, batch_size=32, length=256)
    everything = {}
    for mesh in meshes:
        everything |= _all_of(plan, mesh)
    return {
        key: [
            (predict_time(own, CHIPS["cpu"]).step, estimate_memory(own, "cpu").total)
            for own in plans
        ]
        for key, plans in everything.items()
    }


SHARES = [
    pytest.param(FEW, 0.15),
    *(pytest.param(MESHES, share, marks=pytest.mark.slow) for share in (0.0, 0.15, 0.4, 1.0)),
]


@pytest.mark.rows(2)
@pytest.mark.parametrize(("meshes", "share"), SHARES)
def test_search_over_arrangements_equals_brute_force(meshes, share):
    plan, plans_of = plan_of(MODEL, batch_size=32, length=256), priced(meshes)
    sizes = sorted(need for plans in plans_of.values() for _, need in plans)
    memory = int(sizes[0] + share * (sizes[-1] - sizes[0])) + 1
    chip = dataclasses.replace(CHIPS["cpu"], memory=memory)
    best = [
        min((time for time, need in plans if need <= memory), default=math.inf)
        for plans in plans_of.values()
    ]
    wanted = sorted(time for time in best if math.isfinite(time))
    found = search(plan, meshes, chip, keep=len(plans_of), space=SPACE)
    assert found.num_arrangements == len(plans_of)
    assert [one.time.step for one in found.fitting] == pytest.approx(wanted)
    first = search(plan, meshes, chip, keep=2, space=SPACE)
    assert [one.time.step for one in first.fitting] == pytest.approx(wanted[:2])
    assert all(one.time.step <= wanted[0] and one.need > memory for one in first.faster)


def test_no_plan_takes_or_needs_less_than_the_search_assumes():
    """Where it does, the search leaves out a plan that is better than the one it returns."""
    plan, chip = plan_of(MODEL, batch_size=32, length=256), CHIPS["cpu"]
    for plans in _all_of(plan, MESHES[4]).values():
        sizes = Sizes.of(plans[0])
        for own in plans:
            assert time_of(sizes.at(own), chip) == predict_time(own, chip)
            assert 0 < least_time(sizes.at(own), chip) <= predict_time(own, chip).step
            need = estimate_memory(own, chip.platform).total
            assert 0 < least_memory(sizes.at(own), chip.platform).total <= need


def test_closest_needs_the_least_of_all():
    plan = plan_of(MODEL, batch_size=32, length=256)
    chip = dataclasses.replace(CHIPS["cpu"], memory=1)
    found = search(plan, FEW, chip, space=SPACE)
    assert not found.fitting and found.closest is not None
    assert found.closest.need == min(need for plans in priced(FEW).values() for _, need in plans)


def test_factors_move_the_plan_to_one_that_fits():
    """Twice the temporaries of a remat: the same plan is found again only if it still fits."""
    plan = plan_of(MODEL, batch_size=32, length=256)
    chip = dataclasses.replace(CHIPS["cpu"], memory=2**40)
    space = Space(remats=("none", "full"), has_micro_batches=True)
    first = search(plan, MESHES[:1], chip, space=space).fitting[0]
    assert first.plan.execution.remat == "none"
    tight = dataclasses.replace(chip, memory=int(first.need) + 1)
    other = search(plan, MESHES[:1], tight, space=space, factors={"none": 2.0}).fitting[0]
    assert plan_in_words(other.plan) != plan_in_words(first.plan)
    assert other.need <= tight.memory and other.time.step >= first.time.step


def test_reasons_name_the_part_that_adds_most():
    plan = plan_of(MODEL, batch_size=32, length=256)
    found = search(plan, MESHES, CHIPS["cpu"], space=EVERYTHING)
    best, *others = found.fitting
    assert len(others) == 4
    for one in others:
        why = why_not(best, one)
        slower = one.time.step - best.time.step
        if slower > 1e-6 * best.time.step:
            part, seconds = why.split(": ")[1].rsplit(" +", 1)
            assert why.startswith(f"+{slower:.3g} s: ")
            assert part in {"compute", "memory", *one.time.communication, *best.time.communication}
            assert float(seconds.removesuffix(" s")) >= slower / 20
        else:
            assert why.startswith("as fast, ")


def test_dense_layers_have_a_remat_of_their_own():
    """Between recomputing nothing and everything, where only one kind of layer fits."""
    model = dataclasses.replace(MODEL, dense_layers=(0, 1), dense_dim=2048)
    plan = plan_of(model, batch_size=32, length=256)
    whole = dataclasses.replace(CHIPS["cpu"], memory=2**40)
    space = Space(remats=("none", "full"))

    def first(chip):
        return search(plan, MESHES[:1], chip, space=space).fitting[0]

    none = first(whole)
    tight = first(dataclasses.replace(whole, memory=int(none.need) - 1))
    execution = tight.plan.execution
    assert {execution.remat, execution.remat_dense} == {"none", "full"}
    alike = dataclasses.replace(execution, remat="full", remat_dense=None)
    full = predict_time(dataclasses.replace(plan, execution=alike), whole).step
    assert none.time.step < tight.time.step < full


def test_what_parameters_add_is_bounded_and_the_same_where_a_search_shares_it():
    """The two bounds together are close to the time, so that few times are predicted."""
    plan, chip = plan_of(MODEL, batch_size=32, length=256), CHIPS["h100"]
    chip = dataclasses.replace(chip, overlap=0.5)
    least_times, layouts, seconds = {}, {}, {}
    meshes = (MESHES[4], MeshConfig(stage=2, replica=2, expert=2, tensor=2))
    found = [one for mesh in meshes for one in arrangements(plan, mesh, EVERYTHING)]
    dividing = [one for one in found if isinstance(one, Arrangement)]
    assert len(dividing) > 20
    flops = TokenFlops.of(plan)
    for arrangement in dividing[::2]:
        execution = arrangement.plan.execution
        for number, remat in itertools.product((0, -1), (0, -1)):
            own = arrangement.at(number, remat)
            sizes = Sizes.of(own, flops)
            key = arrangement.record, own.accumulation, own.execution.remat
            least = least_time(sizes, chip)
            assert least_times.setdefault(key, least) == least
            record = DeviceLayout.record(execution)
            layout = layouts.setdefault(record, sizes.layout)
            assert layout.parameters == sizes.parameters and layout.mesh == sizes.mesh
            parameters = seconds.setdefault(record, ParameterSeconds.of(sizes, chip))
            bound = least + parameters.unhidden(sizes, chip)
            time = time_of(sizes, chip).step
            assert 0.5 * time < bound <= time
            assert parameters.at(sizes) > 0


@pytest.mark.parametrize("stages", [2, 4])
def test_no_number_of_micro_batches_takes_less_than_stages_that_never_wait(stages):
    plan, chip = plan_of(MODEL, batch_size=64, length=256), CHIPS["h100"]
    orders = (GPipeConfig(), InterleavedConfig(), InterleavedConfig(weight_gradients="deferred"))
    if stages == 2:
        orders += (InterleavedConfig(chunks=2),)
    space = dataclasses.replace(EVERYTHING, pipelines=orders)
    flops = TokenFlops.of(plan)
    for mesh in (MeshConfig(stage=stages, tensor=2), MeshConfig(stage=stages, data=2, expert=2)):
        found = list(arrangements(plan, mesh, space))
        dividing = [one for one in found if isinstance(one, Arrangement)]
        assert len(dividing) > 10
        for arrangement in dividing[::3]:
            own = arrangement.at(0, 0)
            layout = Sizes.of(own, flops).layout
            floor = least_time(Sizes.on(layout, own, never_waits=True), chip)
            plans = (arrangement.at(n, 0) for n in range(len(arrangement.numbers)))
            least = [least_time(Sizes.on(layout, one), chip) for one in plans]
            assert 0.3 * min(least) < floor <= min(least) < max(least)


def _counted(monkeypatch, *functions):
    """Return the numbers of calls of some functions of modules or classes from now on."""
    calls = collections.Counter()

    def count(module, name):
        function = getattr(module, name)

        def counting(*arguments, **named):
            calls[name] += 1
            return function(*arguments, **named)

        monkeypatch.setattr(module, name, counting)

    for module, name in functions:
        count(module, name)
    return calls


def test_a_search_with_stages_bounds_few_numbers_of_micro_batches(monkeypatch):
    plan = plan_of(MODEL, batch_size=1024, length=256)
    calls = _counted(monkeypatch, (best_first, "least_time"), (StepPlan, "table_by"))
    meshes = list(enumerate_meshes(16, 1, (2, 4)))
    found = search(plan, meshes, CHIPS["h100"], space=EVERYTHING)
    starts = {
        (one.record, number)
        for mesh in meshes
        for one in arrangements(plan, mesh, EVERYTHING)
        if isinstance(one, Arrangement)
        for number in one.numbers
    }
    assert len(found.fitting) == 5
    assert calls["least_time"] < len(starts) / 2
    calls.clear()
    tables = {}
    kept = [one for mesh in meshes for one in arrangements(plan, mesh, EVERYTHING, None, tables)]
    assert calls["table_by"] == len(tables) < len(kept) / 10


def test_a_search_predicts_few_times_and_lays_parameters_out_once(monkeypatch):
    """Counts of what costs most: of all plans of a search with every choice."""
    names = ("time_of", "least_time", "abstract_state")
    calls = _counted(monkeypatch, *((best_first, name) for name in names), (StepPlan, "table_by"))
    plan = plan_of(MODEL, batch_size=256, length=256)
    meshes = list(enumerate_meshes(16, 1, (1, 2)))
    found = search(plan, meshes, CHIPS["h100"], space=EVERYTHING)
    assert len(found.fitting) == 5 and found.num_arrangements > 500
    assert calls["time_of"] < found.num_arrangements / 50
    assert calls["least_time"] < found.num_arrangements
    assert calls["table_by"] < found.num_arrangements / 2
    assert calls["abstract_state"] <= 2 * len(found.fitting)
