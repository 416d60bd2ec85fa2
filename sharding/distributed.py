# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Starts the processes of a job, and turns the rows of each into global arrays.

A process finds the others by the first of these that is set:

    arguments of `start_processes`, or JAX_COORDINATOR_ADDRESS (host:port), JAX_NUM_PROCESSES and
    JAX_PROCESS_ID; those that are missing come from the cluster
    Slurm with several nodes or tasks, TPU_WORKER_HOSTNAMES with several names,
    MEGASCALE_NUM_SLICES: `jax.distributed` finds the rest
    nothing: one process

Several processes may use a loopback address (localhost, 127.*, ::1) if they run on one host, as in
tests. A job has several hosts if Slurm (SLURM_JOB_NUM_NODES), a TPU pod (TPU_WORKER_HOSTNAMES) or
an indexed Kubernetes job (JOB_COMPLETION_INDEX: a pod per process) states so. Without such a
statement, a process that times out at a loopback address raises an error that mentions it, before
`jax.distributed` would abort without a reason.
"""

from __future__ import annotations

import ipaddress
import math
import os
import re
import socket
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.jax_versions import delay_coordination_shutdown
from sharding.axes import BATCH_AXES, pieces

Tree = TypeVar("Tree")
Result = TypeVar("Result")

_LAST_CALLS = 1.0
"""Seconds that the coordination service waits for the last calls of its clients when a job ends."""


def start_processes(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    initialization_timeout: int = 300,
    heartbeat_timeout: int = 100,
) -> None:
    """Join the other processes of the job, if the arguments or the environment name any.

    Call it before anything touches a device.

    Args:
        coordinator: `host:port` at which process 0 listens; None: from the environment.
        num_processes: Processes of the whole job; None: from the environment.
        process_id: Index of this process, from 0; None: from the environment.
        initialization_timeout: Seconds within which all processes must have joined.
        heartbeat_timeout: Seconds without a heartbeat after which a process counts as dead, and
            the others end.

    Raises:
        ValueError: A malformed address, a loopback address for several hosts, numbers that are
            malformed or inconsistent, timeouts that are not positive, or a coordinator that does
            not answer.
    """
    environment = os.environ
    _check_timeouts(initialization_timeout, heartbeat_timeout)
    coordinator = coordinator or environment.get("JAX_COORDINATOR_ADDRESS") or None
    num_processes = _number("JAX_NUM_PROCESSES", num_processes, environment)
    process_id = _number("JAX_PROCESS_ID", process_id, environment)
    hosts = num_hosts(environment)
    is_stated = coordinator is not None or num_processes is not None
    if hosts == 1 and (num_processes == 1 or not (is_stated or _tasks(environment) > 1)):
        return
    if num_processes is not None and process_id is not None and process_id >= num_processes:
        raise ValueError(
            f"JAX_PROCESS_ID={process_id} must be below JAX_NUM_PROCESSES={num_processes}:"
            " processes count from 0"
        )
    if coordinator is not None:
        host, port = host_and_port(coordinator)
        if hosts > 1 and is_loopback(host):
            raise ValueError(
                f"JAX_COORDINATOR_ADDRESS={coordinator} is this very host, and the job has {hosts}"
                " hosts: those others would wait for themselves; give a name of the first"
                " process's host that the others can resolve, such as node0:8476"
            )
        if process_id:
            _await_coordinator(host, port, process_id, initialization_timeout)
    try:
        jax.distributed.initialize(
            coordinator,
            num_processes,
            process_id,
            initialization_timeout=initialization_timeout,
            heartbeat_timeout_seconds=heartbeat_timeout,
        )
    except ValueError as error:  # raised by JAX where the environment is incomplete
        raise ValueError(
            f"the processes of this job cannot join ({error}): set JAX_COORDINATOR_ADDRESS,"
            " JAX_NUM_PROCESSES and JAX_PROCESS_ID, or start it with srun or on a TPU pod"
        ) from error
    delay_coordination_shutdown(_LAST_CALLS)


def num_hosts(environment: Mapping[str, str]) -> int:
    """Return the hosts of this job according to the variables of a cluster; 1 without any.

    Args:
        environment: Environment variables.
    """
    names = environment.get("TPU_WORKER_HOSTNAMES", "")
    stated = [
        environment.get("SLURM_JOB_NUM_NODES", ""),
        environment.get("MEGASCALE_NUM_SLICES", ""),
        environment.get("JAX_NUM_PROCESSES", "") if "JOB_COMPLETION_INDEX" in environment else "",
    ]
    counts = [int(number) for number in stated if number.isdigit()]
    return max([1, len(names.split(",")), *counts])


def host_and_port(address: str) -> tuple[str, int]:
    """Return host and port of `host:port`; an IPv6 address is in brackets.

    Raises:
        ValueError: It has no host, or no port from 1 to 65535.
    """
    match = re.fullmatch(r"\[?(?P<host>[^\]]+?)\]?:(?P<port>\d+)", address)
    if match is None or not 0 < int(match["port"]) < 65536:
        raise ValueError(
            f"JAX_COORDINATOR_ADDRESS={address} is not host:port: give the first process's host"
            " name and a free port, such as node0:8476"
        )
    return match["host"], int(match["port"])


def is_loopback(host: str) -> bool:
    """Return whether a name or an address means the host on which it is used."""
    if host.lower() in ("localhost", "localhost.localdomain", "ip6-localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _tasks(environment: Mapping[str, str]) -> int:
    """Return the processes that one srun has started; a shell inside an allocation is one."""
    tasks = environment.get("SLURM_STEP_NUM_TASKS", "")
    return int(tasks) if tasks.isdigit() else 1


def _number(name: str, value: int | None, environment: Mapping[str, str]) -> int | None:
    text = str(value) if value is not None else environment.get(name, "")
    lowest = 0 if name == "JAX_PROCESS_ID" else 1
    if not text:
        return None
    if not text.isdigit() or int(text) < lowest:
        raise ValueError(f"{name}={text} must be a whole number of at least {lowest}")
    return int(text)


def _check_timeouts(initialization: int, heartbeat: int) -> None:
    for name, seconds in (
        ("initialization_timeout", initialization),
        ("heartbeat_timeout", heartbeat),
    ):
        if seconds < 1:
            raise ValueError(f"{name}={seconds} must be at least 1 second")


def _await_coordinator(host: str, port: int, process_id: int, seconds: int) -> None:
    """Wait until the coordinator listens; JAX would abort the process instead of raising."""
    until = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
            return
        except OSError as error:
            reason = error.strerror or str(error)
        if time.monotonic() > until:
            where = f"{host}:{port}"
            if is_loopback(host):
                where += " (a loopback address: it is looked for on this host only)"
            raise ValueError(
                f"process {process_id} found no coordinator at {where} within {seconds} s"
                f" ({reason}): start process 0 on the host of that name, and see that the port is"
                " free and not filtered"
            )
        time.sleep(0.2)


def batch_part(mesh: Mesh) -> tuple[int, int]:
    """Return which part of every batch this process reads, and the number of parts.

    Args:
        mesh: Mesh from `sharding.make_mesh`.
    """
    return batch_parts(mesh, lambda device: device.process_index)[jax.process_index()]


def batch_parts(mesh: Mesh, process_of: Callable[[jax.Device], int]) -> dict[int, tuple[int, int]]:
    """Return for each process the part of a batch that its devices hold, and the number of parts.

    Processes whose devices differ along other axes alone (`tensor`, `seq`) hold the same rows, and
    have the same part.

    Args:
        mesh: Mesh from `sharding.make_mesh`.
        process_of: Function from a device to its process.

    Raises:
        ValueError: Processes hold rows that overlap, or different numbers of rows.
    """
    axes = pieces(mesh.axis_names, BATCH_AXES)
    shards = math.prod(mesh.shape[axis] for axis in axes)
    places = NamedSharding(mesh, PartitionSpec(axes)).devices_indices_map((shards,))
    processes: dict[int, set[int]] = {}
    for device, (rows,) in places.items():
        processes.setdefault(process_of(device), set()).update(range(*rows.indices(shards)))
    parts = sorted({tuple(sorted(rows)) for rows in processes.values()})
    if len({len(part) for part in parts}) > 1 or sum(map(len, parts)) != shards:
        shown = "; ".join(
            f"process {at}: {sorted(rows)}" for at, rows in sorted(processes.items())[:4]
        )
        raise ValueError(
            f"the processes do not share the {shards} pieces of a batch out ({shown}): choose sizes"
            " of the mesh that are multiples or divisors of the devices of a process"
        )
    return {at: (parts.index(tuple(sorted(rows))), len(parts)) for at, rows in processes.items()}


def global_batch(rows: Tree, mesh: Mesh) -> Tree:
    """Return global arrays from the rows that this process read.

    Args:
        rows: Pytree of numpy arrays `[B / parts, ...]`: the part of `batch_part`.
        mesh: Mesh from `sharding.make_mesh`; rows are sharded over its batch axes.
    """

    def place(array: np.ndarray) -> jax.Array:
        spec = PartitionSpec(pieces(mesh.axis_names, BATCH_AXES), *(None,) * (array.ndim - 1))
        return jax.make_array_from_process_local_data(NamedSharding(mesh, spec), array)

    return jax.tree.map(place, rows)


def agree(code: int) -> int:
    """Return the largest number of all processes, on all of them; each must call this.

    Args:
        code: Number of this process.
    """
    return int(np.max(gather(np.asarray([code], np.int32))))


def on_first(action: Callable[[], Result], failure: str) -> Result | None:
    """Return the result of an action of the first process, None on the others; each must call this.

    Args:
        action: Called on the first process alone.
        failure: Message of the error on the other processes.

    Raises:
        ValueError: The action has raised it; raised on all processes, so that none waits for one
            that has ended.
    """
    result = None
    problem = None
    if jax.process_index() == 0:
        try:
            result = action()
        except ValueError as error:
            problem = error
    if agree(problem is not None):
        raise problem or ValueError(failure)
    return result


def gather(values: np.ndarray) -> np.ndarray:
    """Return the values of all processes, `[processes, ...]`, on all; each must call this.

    Args:
        values: Values of this process, of one shape on all, at most 32 bits each.
    """
    if jax.process_count() == 1:
        return values[None]
    return np.asarray(multihost_utils.process_allgather(values))


def share(values: np.ndarray, is_source: bool) -> np.ndarray:
    """Return the values of one process, on all of them; each must call this.

    Args:
        values: Vector of this process, at most 32 bits a value; of processes other than the source
            only the dtype matters.
        is_source: Whether this process is the source; true for exactly one.
    """
    if jax.process_count() == 1:
        return values
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(values)), is_source))
    sent = values if is_source else np.zeros(size, values.dtype)
    return np.asarray(multihost_utils.broadcast_one_to_all(sent, is_source))
