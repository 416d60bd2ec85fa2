# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Instances join, drain and change their devices while an engine serves, as in the simulator."""

from __future__ import annotations

import dataclasses
import threading
import time

import jax
import pytest

from jaxmoe.contrib.fleet.config import FleetConfig
from jaxmoe.contrib.fleet.dispatch import DistServeConfig
from jaxmoe.contrib.fleet.engine import FleetEngine
from jaxmoe.contrib.fleet.instances import reachable
from jaxmoe.contrib.fleet.resharding import BusyError
from jaxmoe.contrib.fleet.scaling import SCALING
from jaxmoe.contrib.fleet.serving import FleetSizesConfig
from jaxmoe.contrib.serving_lab.simulation import Arrival, Simulation
from jaxmoe.serve import BATCHING, LatencyObjective, Request, Sampling
from sharding import MeshConfig
from tests.jaxmoe.contrib.fleet.test_fleet import CHIP, FACTS, SMALL
from tests.support.fleets import MeshedLayouts, MeshedWorker, PageWorker
from tests.support.page_executor import answer
from tests.support.simulated import SIZES, Ticks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shared(Ticks):
    """Devices share the second of a step; instances have their weights."""

    def cost(self, parts, *, share=1.0, nano_batches=1):
        found = Ticks.cost(self, parts, share=share, nano_batches=nano_batches)
        return dataclasses.replace(found, seconds=1.0 / self.num_chips)

    def loading_seconds(self):
        return 0.0

    def resharding_seconds(self, num_chips):
        return 0.0


COST = Shared(sizes=SIZES, chip=CHIP)
SCALED = dataclasses.replace(FACTS, num_pages=30, max_waiting=256, cost=COST)


def workload():
    """Return times and requests: one a second, then few."""
    times = [0.5 + number for number in range(25)] + [30.5 + 6 * number for number in range(8)]
    return [
        (
            time_,
            Request(
                id=id_,
                prompt=tuple(range(id_ % 3, id_ % 3 + 4)),
                sampling=Sampling(max_tokens=6),
                objective=LatencyObjective(ttft=10.0, tpot=2.0),
            ),
        )
        for id_, time_ in enumerate(times)
    ]


def logged(scaling, clock):
    """Return a list that gets every decision."""
    found, decide = [], scaling._scaler

    def noted(view):
        wanted = decide(view)
        ids = tuple(request.id for request in view.arrived)
        asked = (clock(), ids, len(view.fleet.members), view.num_chips)
        found.append((*asked, wanted.instances, wanted.num_chips))
        return wanted

    scaling._scaler = noted
    return found


def until(condition):
    for _ in range(6000):
        if condition():
            return
        time.sleep(0.005)
    raise AssertionError("nothing has happened for 30 s")


@pytest.mark.parametrize(("name", "number"), [("slo", 3), ("elastic_experts", 1)])
def test_the_engine_takes_the_scaling_decisions_of_the_simulator(name, number):
    config = SCALING[name](interval=5.0, **({"most": 4} if name == "elastic_experts" else {}))
    given = workload()
    arrivals = [
        Arrival(request=one, time=time_, answer=tuple(answer(one, 40))) for time_, one in given
    ]
    simulation = Simulation(
        arrivals, SCALED, BATCHING["split_fuse"](), COST, num_instances=number, scaling=config
    )
    expected = logged(simulation.scaling, lambda: simulation.now)
    simulation.run()

    now = [0.0]
    workers = [MeshedWorker(SCALED, MeshConfig()) for _ in range(number)]
    chosen = FleetConfig(scaling=config)
    options = {"clock": lambda: now[0], "hardware": COST, "layouts": MeshedLayouts(8)}
    with FleetEngine(workers, fleet=chosen, **options) as engine:
        scaling = engine._members.scaling
        found, streams = logged(scaling, lambda: now[0]), []
        times = [(time_, one) for time_, one in given] + [(one[0], None) for one in expected]
        for moment, request in sorted(times, key=lambda pair: pair[0]):
            read = threading.Event()
            engine._inbox.put(read.set)
            assert read.wait(60)  # what came before has been taken in
            now[0] = moment
            if request is None:
                engine._inbox.put(lambda: None)
                until(lambda t=moment: found and found[-1][0] == t and not scaling._is_changing)
            else:
                asked, limits = (request.prompt, request.sampling), request.objective
                streams.append(engine.submit(*asked, objective=limits))
        assert engine.drain(timeout=60)
        engine._members.fleet.check_pages()
        assert found == expected and scaling.changes == simulation.scaling.changes
        submitted = sum(
            i.queues.submitted - i.queues.moved_away for i in engine._members.fleet.instances
        )
    assert submitted == len(given)
    for (_, request), stream in zip(given, streams, strict=True):
        *tokens, ended = stream
        assert ended.reason == "length" and [one.token for one in tokens] == answer(request, 40)
    opened, chips = zip(*[change[1:] for change in scaling.changes], strict=True)
    assert (max(opened), max(chips)) == ((3, 1) if name == "slo" else (1, 4))
    assert (opened[-1], chips[-1]) == (1, 1)


def test_what_an_engine_lacks_is_refused_in_words():
    workers = [PageWorker(SMALL) for _ in range(2)]

    def refused(name, **options):
        config = FleetConfig(scaling=SCALING[name]())
        with pytest.raises(ValueError) as caught:
            FleetEngine(workers, fleet=config, **options)
        return str(caught.value)

    assert "scaling='polca' needs the power of devices" in refused("polca", hardware=COST)
    assert "scaling='slo' asks how long a step takes" in refused("slo")
    assert "scaling='elastic_experts' lays instances" in refused("elastic_experts", hardware=COST)
    alone = [MeshedWorker(SMALL, MeshConfig(expert=2))]
    workers, few = alone, {"hardware": COST, "layouts": MeshedLayouts(3)}
    assert "'elastic_experts' finds no mesh to grow to" in refused("elastic_experts", **few)
    with pytest.raises(ValueError, match=r"scaling='polca' needs the power .*serving simulate"):
        FleetSizesConfig(scaling=SCALING["polca"]())
    with pytest.raises(ValueError, match=r"scaling='slo' serves requests within scaling.ttft"):
        FleetSizesConfig(scaling=SCALING["slo"]())
    with pytest.raises(ValueError, match="scaling='slo' lets instances join and drain"):
        FleetSizesConfig(scaling=SCALING["slo"](tpot=0.1), instances=2, dispatch=DistServeConfig())
    FleetSizesConfig(scaling=SCALING["slo"](tpot=0.1), instances=2)


def test_executors_of_unequal_sizes_are_refused():
    other = dataclasses.replace(SMALL, num_pages=31)
    with pytest.raises(ValueError, match="num_pages=31 of executor 1 differs from 30 of the first"):
        FleetEngine([PageWorker(SMALL), PageWorker(other)])


def test_one_change_of_the_mesh_goes_on_at_a_time_and_exchanges_are_not_kept():
    gate = threading.Event()
    request = Request(id=0, prompt=(1, 2, 3), sampling=Sampling(max_tokens=30))
    workers = [MeshedWorker(SMALL, MeshConfig()) for _ in range(2)]
    with FleetEngine(workers, layouts=MeshedLayouts(4, gate)) as engine:
        resharder = engine.resharder
        with pytest.raises(ValueError, match="more than 4 devices"):
            resharder.begin(MeshConfig(expert=8))
        stream = engine.submit(request.prompt, request.sampling)
        done = resharder.begin(MeshConfig(expert=4))
        with pytest.raises(BusyError, match="another change of the mesh is going on"):
            resharder.begin(MeshConfig(expert=2))
        *tokens, _ = stream  # requests are answered meanwhile
        assert [one.token for one in tokens] == answer(request, 40)
        gate.set()
        cost = done.result(60)
        assert (cost.weight_bytes, cost.page_bytes, cost.pause_seconds) == (200, 20, 0.5)
        assert resharder.mesh == MeshConfig(expert=4) and not engine._exchanges
        again = resharder.begin(MeshConfig(expert=4)).result(60)
        assert again.weight_bytes == again.page_bytes == 0
    with FleetEngine([PageWorker(SMALL)]) as engine:
        with pytest.raises(ValueError, match="mesh .* is fixed"):
            engine.resharder.begin(MeshConfig(expert=2))


def test_instances_may_grow_to_their_own_devices_and_their_part_of_the_rest():
    assert reachable([[0], [1]], [*range(8)]) == [[0, 2, 3, 4], [1, 5, 6, 7]]
    assert reachable([[0, 1]], [*range(4)]) == [[0, 1, 2, 3]]
    assert reachable([[0], [0]], [0, 1]) == [[0, 1], [0, 1]]
    assert reachable([jax.devices()[:1]]) == [jax.devices()]
