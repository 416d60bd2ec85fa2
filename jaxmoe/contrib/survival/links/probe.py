# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`LinkProbe`: measures messages between neighbours on the devices of a mesh.

A round is a set of messages of which no two share a device, sent at once by one program over the
whole mesh (`jax.lax.ppermute` over all axes). All processes meet before a round; each then notes
when the result is on each of its devices, so the time of a message is that of its receiver, and
includes the delay of a sender that starts late. Of several repeats the shortest counts.

    together    an axis in two rounds (three if its size is odd), all rings at once: few programs
    single      one message a round: exact also where messages share a bus or the devices a
                processor, at the price of a program for every link

The first round sends nothing: every device reads and writes as many bytes alone.
"""

from __future__ import annotations

import dataclasses
import math
import socket
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxmoe.contrib.survival.links.faults import ALONE, LinkMatrix
from sharding.distributed import gather

Rounds = Literal["together", "single"]
Pair = tuple[int, int]


def axis_rounds(mesh: Mesh, axis: str) -> list[list[Pair]]:
    """Return the messages from every device to its next neighbour on an axis, in rounds.

    Args:
        mesh: Devices.
        axis: Axis with more than one device.

    Returns:
        Pairs of flat places in the mesh; no place is twice in a round.
    """
    at = mesh.axis_names.index(axis)
    places = np.moveaxis(np.arange(mesh.size).reshape(mesh.devices.shape), at, 0)
    size = len(places)
    rounds = [range(0, size - 1, 2), range(1, size - size % 2, 2)]
    rounds += [range(size - 1, size)] * (size % 2)
    return [
        [
            (int(source), int(target))
            for index in indices
            for source, target in zip(
                places[index].flat, places[(index + 1) % size].flat, strict=True
            )
        ]
        for indices in rounds
        if indices
    ]


def process_rounds(processes: Sequence[int], shift: int) -> list[list[Pair]]:
    """Return the messages from every process to the one that is `shift` further, in rounds.

    All devices of a process send, each to the device at the same place in the other process. With
    the shifts from 1 to one less than the processes, every ordered pair of processes is measured.

    Args:
        processes: Process of each place; all have the same number.
        shift: Processes from the sender to the receiver, which go round.

    Returns:
        Pairs of flat places in the mesh; no place is twice in a round.

    Raises:
        ValueError: Processes have different numbers of devices.
    """
    places: dict[int, list[int]] = {}
    for place, process in enumerate(processes):
        places.setdefault(process, []).append(place)
    number = len(places)
    order = sorted(places)
    if len({*map(len, places.values())}) > 1:
        counts = {process: len(places[process]) for process in order}
        raise ValueError(
            f"pairs=processes needs as many devices on every process, and they have {counts}:"
            " measure pairs=neighbours"
        )
    cycle = number // math.gcd(number, shift)
    cycles = math.gcd(number, shift)
    turns = [range(0, cycle - 1, 2), range(1, cycle - cycle % 2, 2)]
    turns += [range(cycle - 1, cycle)] * (cycle % 2)
    return [
        [
            pair
            for first in range(cycles)
            for turn in among
            for pair in zip(
                places[order[(first + turn * shift) % number]],
                places[order[(first + (turn + 1) * shift) % number]],
                strict=True,
            )
        ]
        for among in turns
        if among
    ]


def host_of_processes() -> list[int]:
    """Return a number for the host of each process, equal on equal hosts; all must call this."""
    name = zlib.crc32(socket.gethostname().encode()) & 0x7FFFFFFF
    return [int(number) for number in gather(np.asarray([name], np.int32))[:, 0]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _ProbeRound:
    """A compiled round."""

    row: int
    """Row of the matrix."""
    sources: dict[int, int]
    """Place of the sender by that of the receiver."""
    run: Callable[[jax.Array], jax.Array]
    """Program."""


class LinkProbe:
    """Programs that measure every link of a mesh with one size of message.

    Every process must make it, and call it, at the same time.

    Args:
        mesh: Devices.
        message_bytes: Bytes of each message.
        repeats: Times that each round is measured.
        rounds: Whether messages share rounds.
        processes: Process of each device, to measure every pair of processes as well; None
            measures neighbours alone.
        clock: Returns seconds.
    """

    def __init__(
        self,
        mesh: Mesh,
        message_bytes: int,
        *,
        repeats: int = 5,
        rounds: Rounds = "together",
        processes: Sequence[int] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.mesh = mesh
        self._repeats = repeats
        self._clock = clock
        self._spec = PartitionSpec(mesh.axis_names)
        devices = list(mesh.devices.flat)
        me = jax.process_index()
        self._here = {
            device.id: place for place, device in enumerate(devices) if device.process_index == me
        }
        sent = {axis: axis_rounds(mesh, axis) for axis, size in mesh.shape.items() if size > 1}
        if processes is not None:
            shifts = range(1, len({*processes}))
            sent |= {f"process+{n}": process_rounds(processes, n) for n in shifts}
        self.rows = (ALONE, *sent)
        placed = NamedSharding(mesh, self._spec)
        make = jax.jit(
            lambda: jnp.zeros((mesh.size * message_bytes,), jnp.uint8), out_shardings=placed
        )
        self._given = make()
        self._meet = self._compile_programs(self._sum)
        self._rounds = [self._alone()]
        for row, of_row in enumerate(sent.values(), 1):
            for pairs in of_row:
                groups = [pairs] if rounds == "together" else [[pair] for pair in pairs]
                self._rounds += [self._round(row, group) for group in groups]
        self._targets, self._reaches = self._shape(devices)

    def measure(self) -> LinkMatrix:
        """Return the shortest time of every message, the same on all processes."""
        least_seconds = np.full((len(self.rows), self.mesh.size), np.inf, np.float32)
        for round_ in self._rounds:
            for _ in range(self._repeats):
                jax.block_until_ready(self._meet(self._given))
                for place, seconds in self._time(round_).items():
                    if place in round_.sources:
                        source = round_.sources[place]
                        least_seconds[round_.row, source] = min(
                            least_seconds[round_.row, source], seconds
                        )
        # Each message is timed by the process of its receiver alone.
        seconds = gather(least_seconds).min(axis=0).astype(np.float64)
        return LinkMatrix(
            rows=self.rows,
            seconds=np.where(np.isfinite(seconds), np.maximum(seconds, 1e-9), np.nan),
            targets=self._targets,
            reaches=self._reaches,
        )

    def _time(self, round_: _ProbeRound) -> dict[int, float]:
        """Return the seconds from the start of a round until each device here has its result."""
        began = self._clock()
        result = self.send(round_.run)
        waiting = {shard.device.id: shard.data for shard in result.addressable_shards}
        seconds: dict[int, float] = {}
        while waiting:
            for device, data in list(waiting.items()):
                if data.is_ready():
                    seconds[self._here[device]] = self._clock() - began
                    del waiting[device]
        return seconds

    def send(self, run: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """Start a round.

        Args:
            run: Its program.
        """
        return run(self._given)

    def _alone(self) -> _ProbeRound:
        run = self._compile_programs(lambda x: x + jnp.uint8(1))
        return _ProbeRound(
            row=0, sources={place: place for place in range(self.mesh.size)}, run=run
        )

    def _round(self, row: int, pairs: Sequence[Pair]) -> _ProbeRound:
        names = self.mesh.axis_names
        run = self._compile_programs(lambda x: jax.lax.ppermute(x, names, tuple(pairs)))
        return _ProbeRound(row=row, sources={target: source for source, target in pairs}, run=run)

    def _sum(self, x: jax.Array) -> jax.Array:
        return x[:1] + jax.lax.psum(x[:1], self.mesh.axis_names)

    def _compile_programs(self, function: Callable[[jax.Array], jax.Array]) -> Any:
        # check_vma off: what a sum leaves equal on all devices is given back per device.
        mapped = jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=self._spec,
            out_specs=self._spec,
            check_vma=False,
        )
        return jax.jit(mapped).lower(self._given).compile()

    def _shape(self, devices: Sequence[jax.Device]) -> tuple[np.ndarray, np.ndarray]:
        """Return the receiver of every message, and what it crosses by index of REACHES."""
        targets = np.tile(np.arange(self.mesh.size), (len(self.rows), 1))
        for round_ in self._rounds[1:]:
            for target, source in round_.sources.items():
                targets[round_.row, source] = target
        hosts = host_of_processes()
        processes = np.asarray([device.process_index for device in devices])
        where = np.asarray([hosts[process] for process in processes])
        if devices[0].platform == "tpu":  # links of a slice do not care for processes
            where = processes = np.asarray(
                [getattr(round_, "slice_index", 0) for round_ in devices]
            )
        reaches = np.where(processes[targets] == processes, 0, 1)
        return targets, np.where(where[targets] == where, reaches, 2)
