# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""How processes join a job, and the errors when they cannot.

That they then train as one is proved in tests/experiments/test_processes.py.
"""

import importlib
import re
import socket
import time
import types

import jax
import numpy as np
import pytest

from sharding import distributed
from sharding.distributed import batch_part, batch_parts, start_processes
from sharding.mesh import MeshConfig, make_mesh

NAMES = (
    "JAX_COORDINATOR_ADDRESS",
    "JAX_NUM_PROCESSES",
    "JAX_PROCESS_ID",
    "JOB_COMPLETION_INDEX",
    "SLURM_JOB_NUM_NODES",
    "SLURM_STEP_NUM_TASKS",
    "TPU_WORKER_HOSTNAMES",
    "MEGASCALE_NUM_SLICES",
)
LOOPBACK = {"JAX_COORDINATOR_ADDRESS": "localhost:8476"}


@pytest.fixture
def joined(monkeypatch):
    """Return `joined(environment, ...)`: the arguments passed to JAX, or None."""

    def run(environment, **arguments):
        calls = []
        for name in NAMES:
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(jax.distributed, "initialize", lambda *a, **k: calls.append((a, k)))
        start_processes(**arguments)
        return calls[0] if calls else None

    return run


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"JAX_NUM_PROCESSES": "1"},
        {**LOOPBACK, "JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"},
        {"SLURM_JOB_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1"},
        {"TPU_WORKER_HOSTNAMES": "localhost", "MEGASCALE_NUM_SLICES": "1"},
    ],
)
def test_one_process_joins_nothing(environment, joined):
    assert joined(environment) is None


@pytest.mark.parametrize(
    ("environment", "asked"),
    [
        (
            {**LOOPBACK, "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"},
            ("localhost:8476", 2, 0),  # one host: no other is stated
        ),
        (
            {"JAX_COORDINATOR_ADDRESS": "node0:1", "SLURM_JOB_NUM_NODES": "2"},
            ("node0:1", None, None),
        ),
        ({"SLURM_JOB_NUM_NODES": "2"}, (None, None, None)),
        ({"SLURM_JOB_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "8"}, (None, None, None)),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, (None, None, None)),
        ({"TPU_WORKER_HOSTNAMES": "a", "MEGASCALE_NUM_SLICES": "2"}, (None, None, None)),
        ({"JAX_NUM_PROCESSES": "4"}, (None, 4, None)),
    ],
)
def test_several_processes_join(environment, asked, joined):
    timeouts = {"initialization_timeout": 300, "heartbeat_timeout_seconds": 100}
    assert joined(environment) == (asked, timeouts)


def test_arguments_take_precedence_over_the_environment(joined):
    found = joined(
        {**LOOPBACK, "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"},
        coordinator="node0:1",
        num_processes=4,
        process_id=0,
        initialization_timeout=7,
        heartbeat_timeout=9,
    )
    timeouts = {"initialization_timeout": 7, "heartbeat_timeout_seconds": 9}
    assert found == (("node0:1", 4, 0), timeouts)


SEVERAL_HOSTS = [
    {"SLURM_JOB_NUM_NODES": "2"},
    {"TPU_WORKER_HOSTNAMES": "10.0.0.1,10.0.0.2"},
    {"MEGASCALE_NUM_SLICES": "2"},
    {"JOB_COMPLETION_INDEX": "0", "JAX_NUM_PROCESSES": "2"},
]


@pytest.mark.parametrize("environment", SEVERAL_HOSTS)
def test_loopback_on_several_hosts_raises(environment, joined):
    for host in ("localhost", "127.0.0.1", "127.3.4.5", "[::1]", "LocalHost"):
        address = f"{host}:8476"
        text = f"JAX_COORDINATOR_ADDRESS={address} is this very host, and the job has 2 hosts: "
        text += "those"
        with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
            joined({**environment, "JAX_COORDINATOR_ADDRESS": address})


@pytest.mark.parametrize(
    ("environment", "arguments", "text"),
    [
        (
            {"JAX_COORDINATOR_ADDRESS": "node0"},
            {},
            "JAX_COORDINATOR_ADDRESS=node0 is not host",
        ),
        ({"JAX_COORDINATOR_ADDRESS": "node0:0"}, {}, "JAX_COORDINATOR_ADDRESS=node0:0 is not host"),
        (
            {"JAX_NUM_PROCESSES": "two"},
            {},
            "JAX_NUM_PROCESSES=two must be a whole number",
        ),
        (
            {"JAX_NUM_PROCESSES": "0"},
            {},
            "JAX_NUM_PROCESSES=0 must be a whole number",
        ),
        (
            {"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "2"},
            {},
            "JAX_PROCESS_ID=2 must be below JAX_NUM_PROCESSES=2: processes count from 0",
        ),
        ({}, {"initialization_timeout": 0}, "initialization_timeout=0 must be at least 1 second"),
        ({}, {"heartbeat_timeout": -1}, "heartbeat_timeout=-1 must be at least 1 second"),
    ],
)
def test_bad_transition_raises(environment, arguments, text, joined):
    with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
        joined(environment, **arguments)


def test_absent_coordinator_raises_instead_of_aborting(joined):
    with socket.socket() as taken:  # by one that does not listen
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        text = (
            f"process 1 found no coordinator at 127.0.0.1:{port} (a loopback address: it is looked"
            " for on this host only) within 1 s (Connection refused): start process 0"
        )
        with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
            joined(
                {},
                coordinator=f"127.0.0.1:{port}",
                num_processes=2,
                process_id=1,
                initialization_timeout=1,
            )


def test_incomplete_environment_raises_with_the_way_out(joined, monkeypatch):
    def initialize(*arguments, **options):
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    text = "the processes of this job cannot join (coordinator_address should be defined.): set JAX"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
        start_processes()


def test_service_ends_after_the_last_calls_of_its_clients(joined, monkeypatch):
    """Ended at once, gRPC aborts the process if such a call arrives meanwhile."""
    events, state = [], importlib.import_module("jax._src.distributed").State()
    state.client = types.SimpleNamespace(shutdown=lambda: events.append("client"))
    state.service = types.SimpleNamespace(shutdown=lambda: events.append("service"))
    monkeypatch.setattr("jax._src.distributed.global_state", state)
    monkeypatch.setattr(time, "sleep", lambda seconds: events.append(seconds))
    joined(LOOPBACK | {"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"})
    state.shutdown()
    assert events == ["client", 1.0, "service"]


# Devices of a process, and the mesh axes across processes.
PARTS = {
    "each process a part": (2, {"data": 4, "tensor": 2}, {0: 0, 1: 1, 2: 2, 3: 3}),
    "experts are batch axes too": (2, {"data": 2, "expert": 4}, {0: 0, 1: 1, 2: 2, 3: 3}),
    "tensor across processes": (1, {"data": 4, "tensor": 2}, {at: at // 2 for at in range(8)}),
    "all of tensor": (4, {"tensor": 8}, {0: 0, 1: 0}),
    "sequences across processes": (2, {"data": 2, "seq": 4}, {0: 0, 1: 0, 2: 1, 3: 1}),
    "tensor within, data across": (4, {"data": 2, "tensor": 4}, {0: 0, 1: 1}),
}


@pytest.mark.parametrize("name", PARTS)
def test_processes_that_hold_the_same_rows_read_the_same_part(name):
    devices, sizes, expected = PARTS[name]
    mesh = make_mesh(MeshConfig(**sizes))
    first = min(device.id for device in mesh.devices.flat)
    found = batch_parts(mesh, lambda device: (device.id - first) // devices)
    count = len(set(expected.values()))
    assert found == {process: (part, count) for process, part in expected.items()}
    assert batch_part(mesh) == (0, 1), "one process reads it all"


def test_overlapping_rows_raise():
    mesh = make_mesh(MeshConfig(data=4, tensor=2))
    first = min(device.id for device in mesh.devices.flat)
    with pytest.raises(
        ValueError, match=r"4 pieces of a batch out \(process 0: \[0, 1\]; process 1"
    ):
        batch_parts(mesh, lambda device: (device.id - first) // 3)


def _refuse():
    raise ValueError("bytes that are no UTF-8")


def test_what_the_first_process_cannot_read_is_refused_by_all(monkeypatch):
    assert distributed.on_first(lambda: 3, "damaged") == 3
    with pytest.raises(ValueError, match="^bytes that are no UTF-8$"):
        distributed.on_first(_refuse, "damaged, as the first process saw")
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    assert distributed.on_first(_refuse, "damaged") is None, "only the first process acts"
    monkeypatch.setattr(distributed, "gather", lambda values: np.asarray([[1], [0]]))
    with pytest.raises(ValueError, match="^damaged, as the first process saw$"):
        distributed.on_first(_refuse, "damaged, as the first process saw")
