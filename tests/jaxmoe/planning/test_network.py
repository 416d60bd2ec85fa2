# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Order of hosts against brute force, and congestion of a fabric against its definitions."""

from __future__ import annotations

import dataclasses
import itertools
import math

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from jaxmoe.planning.hardware import CHIPS
from jaxmoe.planning.network.fabric import (
    Fabric,
    Flows,
    exact_parts,
    flows_of,
    hashed_loads,
    single_path_bound,
    split_loads,
    spray_bytes,
    spreads,
)
from jaxmoe.planning.network.host_order import (
    CARDS,
    best_order,
    class_bandwidth,
    exchanges,
    order_seconds,
    parse_classes,
)
from jaxmoe.planning.network.links import AxisSize, Link, LinkTable
from jaxmoe.planning.network.measured import host_bandwidth, linked_chip
from jaxmoe.planning.network.page import NetworkConfig, network_lines
from jaxmoe.planning.step_time import predict_time, seconds_of
from jaxmoe.planning.traffic import Traffic, step_traffic
from sharding.expert_parallel import AllToAllConfig
from sharding.mesh import MeshConfig
from tests.jaxmoe.planning.test_planning import plan_of


def traffic(axes, sent, size, messages=0.0):
    return Traffic(reason="x", axes=axes, num_devices=size, bytes=sent, messages=messages)


def brute_force(found, bandwidth):
    """The least seconds of all orders."""
    number = len(bandwidth)
    orders = map(np.asarray, itertools.permutations(range(number)))
    return min(order_seconds(order, found, bandwidth) for order in orders)


def slowly(order, one, mesh, bandwidth, per_host):
    """Seconds of one reason, from its definition: every group, every message of its ring."""
    names, times = list(mesh), []
    for fixed in itertools.product(*(range(n) for a, n in mesh.items() if a not in one.axes)):
        others = iter(fixed)
        at = {axis: next(others) for axis in names if axis not in one.axes}
        ring = []
        for inner in itertools.product(*(range(mesh[a]) for a in names if a in one.axes)):
            where = at | dict(zip([a for a in names if a in one.axes], inner, strict=True))
            place = int(np.ravel_multi_index([where[a] for a in names], tuple(mesh.values())))
            ring.append(order[place // per_host])
        pairs = list(itertools.pairwise([*ring, ring[0]]))
        pairs = pairs[:-1] if one.axes == ("stage",) else pairs
        rates = [bandwidth[a, b] for a, b in pairs if a != b]
        if rates:
            times.append(one.bytes / min(rates))
    return max(times) + 1e-3 * sum(times) / len(times) if times else 0.0


@hypothesis.settings(max_examples=30, deadline=None)
@hypothesis.given(seed=st.integers(0, 2**31))
def test_seconds_of_an_order_are_those_of_every_ring_by_definition(seed):
    rng = np.random.default_rng(seed)
    mesh = {"replica": 2, "stage": 3, "data": 2, "tensor": 2}
    hosts = int(rng.choice([2, 3, 4, 6, 12]))
    bandwidth = rng.uniform(1.0, 10.0, (hosts, hosts))
    order = rng.permutation(hosts)
    for axes in (("stage",), ("data",), ("replica", "data"), ("tensor",)):
        one = traffic(axes, 5.0, math.prod(mesh[axis] for axis in axes))
        wanted = slowly(order, one, mesh, bandwidth, 24 // hosts)
        found = order_seconds(order, exchanges([one], mesh, hosts, 0.0), bandwidth)
        assert found == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("hosts", [2, 3, 4, 6])
def test_annealing_equals_brute_force(hosts):
    """With classes, and with a bandwidth of every pair for itself."""
    rng = np.random.default_rng(hosts)
    mesh = {"stage": 2 if hosts % 2 == 0 else 1, "data": hosts}
    found = exchanges(
        [traffic(("data",), 4.0, mesh["data"]), traffic(("stage",), 1.0, mesh["stage"])][
            : 1 + (mesh["stage"] > 1)
        ],
        mesh,
        hosts,
        0.0,
    )
    classes = class_bandwidth(rng.choice(list(CARDS), hosts).tolist())
    for bandwidth in (classes, rng.uniform(1.0, 10.0, (hosts, hosts))):
        order, seconds = best_order(found, bandwidth, moves=3000)
        assert sorted(order) == list(range(hosts))
        assert seconds == order_seconds(order, found, bandwidth)
        assert seconds == pytest.approx(brute_force(found, bandwidth), rel=1e-9)


@pytest.mark.slow
def test_annealing_equals_brute_force_with_eight_hosts():
    rng = np.random.default_rng(0)
    mesh = {"replica": 2, "stage": 2, "data": 2}
    reasons = [(("data",), 4.0), (("stage",), 1.0), (("replica",), 2.0)]
    found = exchanges([traffic(axes, sent, 2) for axes, sent in reasons], mesh, 8, 0.0)
    for bandwidth in (class_bandwidth(["ib", "roce"] * 4), rng.uniform(1.0, 10.0, (8, 8))):
        _, seconds = best_order(found, bandwidth)
        assert seconds == pytest.approx(brute_force(found, bandwidth), rel=1e-9)


@pytest.mark.parametrize("classes", ["ib roce ib roce ib roce ib roce", "roce ib*4 roce*3"])
def test_with_two_classes_of_cards_the_cut_is_between_the_stages(classes):
    """Data groups exchange much and lie inside of a class; stages exchange little."""
    names, mesh = parse_classes(classes), {"stage": 2, "data": 8}
    found = exchanges(
        [traffic(("data",), 1e9, 8), traffic(("stage",), 1e7, 2)], mesh, len(names), 1e-6
    )
    order, seconds = best_order(found, class_bandwidth(names), moves=3000)
    stages = [{names[host] for host in order[stage * 4 : stage * 4 + 4]} for stage in range(2)]
    assert sorted(map(sorted, stages)) == [["ib"], ["roce"]]
    given = order_seconds(np.arange(8), found, class_bandwidth(names))
    assert given > 5 * seconds
    assert seconds == pytest.approx(1.001 * (1e9 / 25e9 + 1e7 / 3.125e9), rel=1e-3)


def test_equal_hosts_keep_their_order():
    found = exchanges([traffic(("data",), 1.0, 8)], {"data": 8}, 8, 0.0)
    order, _ = best_order(found, class_bandwidth(["ib"] * 8), moves=1000)
    assert order.tolist() == list(range(8))


def test_hosts_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="'infiniband' is not a class .*of ib, roce, ethernet"):
        parse_classes("ib*2 infiniband")
    with pytest.raises(ValueError, match="hosts=3 must divide the 8 devices"):
        exchanges([], {"data": 8}, 3, 0.0)


FABRIC = Fabric(devices_per_leaf=4, spines=6, link_bandwidth=1e9)


def random_flows(seed):
    count = np.random.default_rng(seed).integers(0, 9, (4, 4))
    np.fill_diagonal(count, 0)
    return Flows(count=count, bytes=7.0)


@hypothesis.settings(max_examples=50, deadline=None)
@hypothesis.given(seed=st.integers(0, 2**31), spines=st.integers(1, 16))
def test_parts_by_spines_over_gcd_equal_spraying_exactly(seed, spines):
    """On every link, not only the fullest; and no smaller number of parts does."""
    flows = random_flows(seed)
    fabric = dataclasses.replace(FABRIC, spines=spines)
    exact = split_loads(flows, fabric, lambda number: exact_parts(number, spines))
    ideal = np.stack([flows.count.sum(1), flows.count.sum(0)])[..., None] * flows.bytes / spines
    np.testing.assert_allclose(exact, np.broadcast_to(ideal, exact.shape), rtol=1e-12)
    for number in range(1, 9):
        parts = exact_parts(number, spines)
        assert [k for k in range(1, parts + 1) if number * k % spines == 0] == [parts]


@hypothesis.settings(max_examples=50, deadline=None)
@hypothesis.given(seed=st.integers(0, 2**31), spines=st.integers(1, 16))
def test_one_path_stays_below_its_bound_and_bytes_are_kept(seed, spines):
    flows = random_flows(seed)
    fabric = dataclasses.replace(FABRIC, spines=spines)
    whole = flows.count.sum() * flows.bytes
    for loads in (
        split_loads(flows, fabric, lambda _: 1),
        split_loads(flows, fabric, lambda _: 3),
        hashed_loads(flows, fabric),
    ):
        assert loads.sum(axis=(1, 2)) == pytest.approx([whole, whole])
        assert loads.max() >= spray_bytes(flows, fabric) * (1 - 1e-12)
    one = split_loads(flows, fabric, lambda _: 1).max()
    assert one <= single_path_bound(flows, fabric) * spray_bytes(flows, fabric) * (1 + 1e-12)


def test_the_bound_of_one_path_is_reached_by_one_pair_of_leaves():
    for number, ratio in ((1, 6.0), (4, 1.5), (6, 1.0), (7, 12 / 7)):
        flows = Flows(count=np.array([[0, number], [0, 0]]), bytes=1.0)
        found = {way.name: way.congestion for way in spreads(flows, FABRIC)}
        assert found["assigned"] == pytest.approx(ratio) == single_path_bound(flows, FABRIC)
        assert found["exact"] == pytest.approx(1.0)
        assert found["hashed"] >= found["assigned"] or number > 6


def test_flows_of_collectives_between_leaves():
    mesh = {"data": 4, "tensor": 4}  # a leaf holds the devices of one data index
    ring = flows_of("all-gather", ("data",), 12.0, mesh, FABRIC)
    assert ring.bytes == 12.0
    np.testing.assert_array_equal(ring.count, 4 * np.roll(np.eye(4, dtype=int), 1, axis=1))
    full = flows_of("all-to-all", ("data",), 12.0, mesh, FABRIC)
    assert full.bytes == 4.0
    np.testing.assert_array_equal(full.count, 4 * (1 - np.eye(4, dtype=int)))
    assert flows_of("all-reduce", ("tensor",), 12.0, mesh, FABRIC).count.sum() == 0
    both = flows_of("all-gather", ("data", "tensor"), 12.0, mesh, FABRIC)
    np.testing.assert_array_equal(both.count, np.roll(np.eye(4, dtype=int), 1, axis=1))


def test_an_unusable_fabric_is_refused():
    with pytest.raises(ValueError, match="fabric.spines=0 must be above 0"):
        dataclasses.replace(FABRIC, spines=0)


@pytest.fixture(scope="module")
def plan():
    mesh = MeshConfig(replica=2, data=8, expert=2)
    return plan_of(mesh=mesh, batch_size=64, rules="hybrid", dispatcher=AllToAllConfig())


def test_the_lines_of_a_plan(plan, tmp_path):
    chip = CHIPS["h100"]
    assert network_lines(NetworkConfig(), plan, chip) == []
    config = NetworkConfig(hosts="ib roce ib roce", spines=6, devices_per_leaf=8)
    lines = network_lines(config, plan, chip)
    (order,) = [line for line in lines if line.startswith("order of hosts")]
    numbers = [int(word) for word in order.partition("--processes.order ")[2].split()]
    assert sorted(numbers) == [0, 1, 2, 3] and numbers[0] % 2 == numbers[1] % 2
    rows = [line for line in lines if line.startswith("  rows over expert")]
    assert not rows, "experts are within a leaf"
    (weights,) = [line for line in lines if line.startswith("  weights over data x expert: ")]
    assert "hashed " in weights and "exact 1.00 (6 parts); one path at most 6.00" in weights


def measured_hosts(bandwidth, per_host):
    """Links between all pairs of processes; the first device of each sends slowest."""
    hosts = len(bandwidth)
    links = tuple(
        Link(
            axis=f"process+{(target - source) % hosts}",
            source=source * per_host + device,
            target=target * per_host + device,
            reach="network",
            small_seconds=1e-6,
            large_seconds=1e-6 + 1000 / float(bandwidth[source, target]) / (1 + device),
        )
        for source, target in itertools.permutations(range(hosts), 2)
        for device in range(per_host)
    )
    return LinkTable(
        device_kind="h100",
        mesh=(AxisSize(axis="data", size=hosts * per_host),),
        processes=tuple(place // per_host for place in range(hosts * per_host)),
        devices=tuple(range(hosts * per_host)),
        small_bytes=1,
        large_bytes=1001,
        links=links,
    )


@hypothesis.settings(max_examples=8, deadline=None)
@hypothesis.given(hosts=st.sampled_from([2, 3, 4, 5, 6]), seed=st.integers(0, 2**31))
def test_annealing_equals_brute_force_with_measured_links(hosts, seed):
    """Links of every pair and direction for itself, through the table of the doctor."""
    wanted = np.random.default_rng(seed).uniform(1e9, 1e10, (hosts, hosts))
    bandwidth = host_bandwidth(measured_hosts(wanted, per_host=2))
    np.fill_diagonal(wanted, np.inf)
    np.testing.assert_allclose(bandwidth, wanted)
    mesh = {"stage": 2 - hosts % 2, "data": hosts * 2 // (2 - hosts % 2)}
    reasons = [traffic(("data",), 4e9, mesh["data"])]
    if mesh["stage"] > 1:
        reasons.append(traffic(("stage",), 1e9, 2))
    found = exchanges(reasons, mesh, hosts, 0.0)
    _, seconds = best_order(found, bandwidth, moves=3000)
    assert seconds == pytest.approx(brute_force(found, bandwidth), rel=1e-9)


def test_hosts_are_ordered_by_their_measured_links(plan, tmp_path):
    """Fast links from 0 to 2 to 1 to 3 and back; a pair that was not measured is refused."""
    bandwidth = np.full((4, 4), 1e9)
    for source, target in ((0, 2), (2, 1), (1, 3), (3, 0)):
        bandwidth[source, target] = 2e10
    table, path = measured_hosts(bandwidth, per_host=8), tmp_path / "links.json"
    table.save(path)
    ring = plan_of(mesh=MeshConfig(data=32), batch_size=64, rules="fully_sharded")
    config = NetworkConfig(links=str(path), hosts="measured")
    lines = network_lines(config, ring, CHIPS["h100"])
    (order,) = [line for line in lines if line.startswith("order of hosts")]
    words = order.partition("--processes.order ")[2].split()
    start = words.index("0")
    assert words[start:] + words[:start] == ["0", "2", "1", "3"]
    assert not any("classes in order" in line for line in lines)
    some = dataclasses.replace(table, links=table.links[8:])
    with pytest.raises(ValueError, match="1 of 12 pairs .* such as 0 -> 1: measure them"):
        host_bandwidth(some)
    with pytest.raises(ValueError, match="network.links is None: name a links.json"):
        NetworkConfig(hosts="measured")
    with pytest.raises(ValueError, match="has 32 devices and the plan 2"):
        network_lines(config, plan_of(mesh=MeshConfig(data=2), batch_size=8), CHIPS["h100"])


def test_measured_links_replace_nominal_rates(plan, tmp_path):
    link = Link(
        axis="data", source=0, target=4, reach="network", small_seconds=1e-3, large_seconds=1.001
    )
    table = LinkTable(
        device_kind="h100",
        mesh=(AxisSize(axis="data", size=8), AxisSize(axis="expert", size=2)),
        processes=(0,) * 32,
        devices=tuple(range(32)),
        small_bytes=1,
        large_bytes=1001,
        links=(
            link,
            dataclasses.replace(link, axis="expert", reach="process", large_seconds=0.101),
        ),
    )
    path = tmp_path / "links.json"
    table.save(path)
    linked, mesh = linked_chip(CHIPS["h100"], table), dict(plan.mesh.shape)
    for one in step_traffic(plan):
        if "replica" in one.axes:
            nominal = seconds_of(one, mesh, CHIPS["h100"])
            assert linked.measured_rate(one.axes) is None
            assert seconds_of(one, mesh, linked) == nominal
            continue
        bandwidth = 1000.0 if "data" in one.axes else 1e4
        wanted = one.messages * 1e-3 + one.bytes / bandwidth
        assert seconds_of(one, mesh, linked) == pytest.approx(wanted)
    assert (
        predict_time(plan, linked).all_communication
        > predict_time(plan, CHIPS["h100"]).all_communication
    )
    lines = network_lines(NetworkConfig(links=str(path)), plan, CHIPS["h100"])
    assert lines[0] == "measured links       of 32 x h100"
    assert any(" s measured, " in line for line in lines)
    assert any("not measured, " in line for line in lines)
    with pytest.raises(ValueError, match="cannot be read"):
        network_lines(NetworkConfig(links=str(tmp_path / "none.json")), plan, CHIPS["h100"])
