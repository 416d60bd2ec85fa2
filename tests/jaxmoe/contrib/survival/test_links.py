# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Slow devices and links: planted ones are named, and noise is not.

That a real run of two processes names one that sleeps is in tests/faults/test_watches.py.
"""

import dataclasses
import itertools
import json
import math

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

from jaxmoe.contrib.survival.links import watch as link_watch
from jaxmoe.contrib.survival.links.faults import (
    ALONE,
    LinkMatrix,
    LinkRule,
    SlowDevice,
    in_words,
    locate,
)
from jaxmoe.contrib.survival.links.probe import LinkProbe, axis_rounds, process_rounds
from jaxmoe.contrib.survival.links.watch import SLOWEST, LinkHook, LinkWatch
from jaxmoe.planning.network.links import AxisSize, Link, LinkTable
from sharding.mesh import MeshConfig, make_mesh

MESHES = {
    # Sizes of the axes, and devices of a host.
    "2": ((2,), 2),
    "3": ((3,), 3),
    "ring of 8": ((8,), 8),
    "ring on 2 hosts": ((8,), 4),
    "4 x 2": ((4, 2), 4),
    "cube": ((2, 2, 2), 4),
    "64 on 8 hosts": ((8, 8), 8),
    "512 on 64 hosts": ((4, 16, 8), 8),
}
NOISE, FAULT = 0.1, 8.0
"""Standard deviation of the log of a time, and the factor of a planted fault."""


def clean(rng, name, noise=NOISE):
    """Times of a mesh: each axis and each kind of link has its own speed."""
    sizes, per_host = MESHES[name]
    places = np.arange(math.prod(sizes)).reshape(sizes)
    targets = [places.ravel(), *(np.roll(places, -1, axis).ravel() for axis in range(len(sizes)))]
    targets = np.stack(targets)
    is_far = targets // per_host != np.arange(places.size) // per_host
    seconds = np.where(is_far, 5e-3, 1e-4) * np.arange(1, len(targets) + 1)[:, None]
    seconds = seconds * np.exp(rng.normal(0.0, noise, seconds.shape))
    rows = (ALONE, *(f"axis{axis}" for axis in range(len(sizes))))
    return LinkMatrix(rows=rows, seconds=seconds, targets=targets, reaches=2 * is_far)


def with_slow(matrix, *, devices=(), connections=(), links=(), factor=FAULT):
    """The matrix with slow devices, devices of which only the connections are slow, and links."""
    factors = np.ones(matrix.seconds.shape)
    own = np.arange(matrix.seconds.shape[1])
    for place in devices:
        factors[(matrix.targets == place) | (own == place)] = factor
    for place in connections:
        touched = (matrix.targets == place) | (own == place)
        touched[0] = False
        factors[touched] = factor
    for row, place in links:
        factors[row, place] = factor
    return dataclasses.replace(matrix, seconds=matrix.seconds * factors)


def names(faults):
    return [
        fault.place if isinstance(fault, SlowDevice) else (fault.axis, fault.source, fault.target)
        for fault in faults
    ]


@pytest.mark.parametrize("mesh", MESHES)
def test_noise_is_no_fault(mesh):
    """Nothing in 1000 clean matrices."""
    rng = np.random.default_rng(0)
    number = 1000 if mesh != "512 on 64 hosts" else 200
    assert [locate(clean(rng, mesh)) for _ in range(number)] == [[]] * number


def has_another(matrix, mesh, row, place, slow):
    """Whether a link of the same axis, as far, touches no slow device."""
    own, host = np.arange(matrix.seconds.shape[1]), MESHES[mesh][1]
    targets = matrix.targets[row]
    is_far = targets // host != own // host
    is_other = (is_far == is_far[place]) & (own != place) & (own != slow) & (targets != slow)
    return bool(is_other.any())


@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(mesh=st.sampled_from(list(MESHES)), seed=st.integers(0, 2**31))
def test_planted_faults_are_named_among_noise(mesh, seed):
    """A slow device, a slow link, and both where they share no device: each alone, and named.

    Both at once only where a healthy link of the same kind is left to compare with: a ring over two
    hosts has two far links, and a slow device may stand at one and the slow link be the other.
    """
    rng = np.random.default_rng(seed)
    matrix = clean(rng, mesh)
    number = matrix.seconds.shape[1]
    device = int(rng.integers(number))
    (found,) = locate(with_slow(matrix, devices=[device]))
    assert isinstance(found, SlowDevice) and found.place == device and found.is_slow_alone
    assert 0.5 * FAULT < found.ratio < 2.0 * FAULT
    row, place = int(rng.integers(1, len(matrix.rows))), int(rng.integers(number))
    wanted = (matrix.rows[row], place, int(matrix.targets[row, place]))
    (found,) = locate(with_slow(matrix, links=[(row, place)]))
    assert names([found]) == [wanted] and 0.5 * FAULT < found.ratio < 2.0 * FAULT
    if number >= 8 and device not in wanted and has_another(matrix, mesh, row, place, device):
        both = locate(with_slow(matrix, devices=[device], links=[(row, place)]))
        assert names(both) == [device, wanted]


@pytest.mark.parametrize("mesh", [mesh for mesh in MESHES if mesh != "2"])
def test_a_device_with_slow_connections_is_named_though_it_is_fast_alone(mesh):
    rng = np.random.default_rng(1)
    for place in range(min(16, clean(rng, mesh).seconds.shape[1])):
        (found,) = locate(with_slow(clean(rng, mesh), connections=[place]))
        assert found.place == place and not found.is_slow_alone


def test_of_two_devices_only_what_they_do_alone_tells_them_apart():
    rng = np.random.default_rng(0)
    assert names(locate(with_slow(clean(rng, "2"), devices=[1]))) == [1]
    # Links in both directions are alike: nothing says which of the two, or whether any, is slow.
    assert locate(with_slow(clean(rng, "2"), connections=[1])) == []


def test_slow_kinds_of_links_are_no_fault():
    """All links between hosts fifty times as slow as those within."""
    matrix = clean(np.random.default_rng(0), "ring on 2 hosts")
    assert (matrix.reaches[1] == 2).sum() == 2
    slower = np.where(matrix.reaches == 2, matrix.seconds * 50, matrix.seconds)
    assert locate(dataclasses.replace(matrix, seconds=slower)) == []
    unaware = dataclasses.replace(matrix, reaches=np.zeros_like(matrix.reaches), seconds=slower)
    assert len(locate(unaware)) == 2, "which it would be, if the kinds were not told apart"


def test_words_name_processes_devices_and_links():
    matrix = clean(np.random.default_rng(0), "4 x 2")
    process_of = {10 + place: place // 2 for place in range(8)}
    numbers = list(process_of)
    faults = locate(with_slow(matrix, devices=[2, 3]))
    (line,) = in_words(faults, numbers, process_of)
    assert line.startswith("process 1 is slow: it takes ") and "--exclude 1" in line
    assert "on all of its devices (12, 13)" in line or "(13, 12)" in line
    (line,) = in_words(locate(with_slow(matrix, devices=[5])), numbers, process_of)
    assert line.startswith("device 15 of process 2 is slow")
    (line,) = in_words(locate(with_slow(matrix, links=[(1, 0)])), numbers, process_of)
    assert line.startswith("link 10 -> 12 on the axis axis0 is slow: a message from process 0 to 1")


def test_a_fault_is_named_once_when_it_lasts_and_again_after_it_recovered():
    rng, watch = np.random.default_rng(0), LinkWatch()

    def windows(count, **slow):
        return [len(watch.window(with_slow(clean(rng, "4 x 2"), **slow))) for _ in range(count)]

    assert windows(2, links=[(1, 3)]) + windows(2) == [0, 0, 0, 0], "two windows are too few"
    assert windows(5, links=[(1, 3)], factor=5.0) == [0, 0, 1, 0, 0]
    assert windows(1) + windows(4, devices=[2], factor=50.0) == [0, 0, 1, 0, 0], "large: two"
    assert windows(3, devices=[2], factor=4.0) == [0, 0, 0], "not recovered"
    assert sum(windows(200)) == 0


def test_rounds_send_every_message_once_and_use_no_device_twice():
    mesh = make_mesh(MeshConfig(data=4, tensor=2))
    for sizes in ({"data": 4, "tensor": 2}, {"seq": 5}, {"data": 3, "expert": 2}, {"stage": 8}):
        number = math.prod(sizes.values())
        mesh = make_mesh(MeshConfig(**sizes), jax.devices()[:number])
        places = np.arange(number).reshape(mesh.devices.shape)
        for axis in sizes:
            rounds = axis_rounds(mesh, axis)
            for pairs in rounds:
                used = [place for pair in pairs for place in pair]
                assert len(used) == len(set(used))
            following = np.roll(places, -1, mesh.axis_names.index(axis))
            wanted = zip(places.flat, following.flat, strict=True)
            assert sorted(pair for pairs in rounds for pair in pairs) == sorted(wanted)


@pytest.mark.parametrize("number", [2, 3, 4, 5, 6, 8])
def test_every_process_sends_to_every_other_and_no_device_is_twice_in_a_round(number):
    processes = [place % number for place in range(2 * number)]
    sent = []
    for shift in range(1, number):
        for pairs in process_rounds(processes, shift):
            used = [place for pair in pairs for place in pair]
            assert len(used) == len(set(used))
            sent += [(processes[a], processes[b]) for a, b in pairs]
    wanted = [pair for pair in itertools.permutations(range(number), 2) for _ in range(2)]
    assert sorted(sent) == sorted(wanted)
    with pytest.raises(ValueError, match="as many devices on every process"):
        process_rounds([0, 0, 1], 1)


def test_the_probe_measures_every_pair_of_processes_on_request():
    processes = [0, 0, 1, 1, 2, 2, 3, 3]
    mesh = make_mesh(MeshConfig(data=8))
    matrix = LinkProbe(mesh, 1024, repeats=1, processes=processes).measure()
    assert matrix.rows == (ALONE, "data", "process+1", "process+2", "process+3")
    assert (matrix.seconds > 0.0).all()
    for shift in (1, 2, 3):
        wanted = [(place + 2 * shift) % 8 for place in range(8)]
        assert matrix.targets[1 + shift].tolist() == wanted


@pytest.fixture(scope="module")
def probe():
    return LinkProbe(make_mesh(MeshConfig(data=4, tensor=2)), 4096, repeats=2)


def test_the_probe_measures_every_link(probe):
    matrix = probe.measure()
    assert matrix.rows == (ALONE, "data", "tensor") and not matrix.reaches.any()
    assert np.isfinite(matrix.seconds).all() and (matrix.seconds > 0.0).all()
    ids = np.asarray([device.id for device in probe.mesh.devices.flat])
    assert ids[matrix.targets[1]].tolist() == [*ids[2:], *ids[:2]]
    assert ids[matrix.targets[2]].tolist() == [ids[place ^ 1] for place in range(8)]


def test_the_hook_logs_every_window_and_reports_what_stays_slow(probe, monkeypatch):
    rng, said, logged = np.random.default_rng(0), [], {}
    matrix = with_slow(clean(rng, "4 x 2"), links=[(1, 0)])
    monkeypatch.setattr(LinkProbe, "measure", lambda self: matrix)
    hook = LinkHook(
        lambda: probe, every=10, report=lambda *found: said.append(found), log=logged.__setitem__
    )
    for step in range(1, 61):
        if hook.is_due(step):
            hook.run(step, None)
    assert list(logged) == [10, 20, 30, 40, 50, 60]
    assert logged[10][SLOWEST] == pytest.approx(FAULT, rel=0.5)
    assert logged[10]["links/axis1_seconds"] == pytest.approx(np.median(matrix.seconds[2]))
    ((step, text),) = said
    assert step in (20, 30) and text.startswith("link 0 -> 2 on the axis axis0 is slow")
    assert link_watch.PROBE_BYTES == 2**20


def table(**changes):
    links = [
        Link(
            axis="data", source=0, target=1, reach="process", small_seconds=1e-6, large_seconds=1e-3
        ),
        Link(
            axis="data", source=1, target=0, reach="network", small_seconds=1e-5, large_seconds=2e-3
        ),
        Link(
            axis="data", source=2, target=3, reach="process", small_seconds=2e-6, large_seconds=9e-3
        ),
        Link(
            axis="data", source=3, target=2, reach="process", small_seconds=1e-6, large_seconds=1e-3
        ),
    ]
    fields = {
        "device_kind": "cpu",
        "mesh": (AxisSize(axis="data", size=2), AxisSize(axis="tensor", size=1)),
        "processes": (0, 1, 0, 1),
        "devices": (0, 1, 2, 3),
        "small_bytes": 1,
        "large_bytes": 1_000_001,
        "links": tuple(links),
    }
    return LinkTable(**fields | changes)


def test_tables_are_saved_and_give_rates(tmp_path):
    path = tmp_path / "links.json"
    table().save(path)
    assert LinkTable.load(path) == table()
    rate = table().axis_rate("data")
    # The slowest kind, here the one between hosts; one slow link among three is left out.
    assert rate.latency == 1e-5 and rate.bandwidth == pytest.approx(1e6 / 1.99e-3)
    assert table().axis_rate("tensor") is None
    own = table().rate(table().links[2])
    assert own.bandwidth == pytest.approx(1e6 / (9e-3 - 2e-6))
    data = json.loads(path.read_text())
    assert data["axes"]["data"]["bandwidth"] == rate.bandwidth and "bandwidth" in data["links"][0]


def test_tables_that_cannot_be_read_are_refused(tmp_path):
    path = tmp_path / "links.json"
    with pytest.raises(ValueError, match="cannot be read .* jaxmoe doctor --links"):
        LinkTable.load(path)
    path.write_text("[]")
    with pytest.raises(ValueError, match="is not a table of links"):
        LinkTable.load(path)
    table().save(path)
    data = json.loads(path.read_text())
    path.write_text(json.dumps(data | {"version": 2}))
    with pytest.raises(ValueError, match="links.version=2 is not the version 1"):
        LinkTable.load(path)
    data["links"][0]["large_seconds"] = 0.0
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match="data 0 -> 1 took .* both must be above 0"):
        LinkTable.load(path)


def test_thresholds_keep_faults_apart_from_noise():
    """Half the speed is found where there are many like messages, and never among two."""
    rng = np.random.default_rng(0)
    many, two = clean(rng, "64 on 8 hosts", 0.05), clean(rng, "2", 0.05)
    assert names(locate(with_slow(many, devices=[9], factor=2.0))) == [9]
    assert locate(with_slow(two, devices=[1], factor=2.0)) == []
    assert LinkRule().ratio < 2.0
