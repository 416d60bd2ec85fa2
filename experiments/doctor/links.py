# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Measures the links between neighbouring devices of a mesh, and names slow devices and links.

    jaxmoe doctor --links [--mesh.data 4 --mesh.tensor 2] [--run.directory DIR]

For every axis of the mesh and every pair of neighbours: the time of a message of 1 byte and of a
large one. Prints the rates of each axis and a table by axis and device, and writes `links.json` for
`plan`. With --pairs processes the links between all processes are measured too. Exit code 0 if
nothing is slow, 2 otherwise. On several hosts run it on every one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import jax
import numpy as np
from jax.sharding import Mesh

from experiments.cli import flags
from experiments.cli.exit_codes import ExitCode
from experiments.cli.output import write
from experiments.cli.process import start_process
from experiments.cli.tables import text_table
from experiments.doctor.software import Finding, in_words
from experiments.doctor.timeout import answer_within, check_timeout
from jaxmoe.contrib.survival.links import faults
from jaxmoe.contrib.survival.links.faults import ALONE, LinkMatrix
from jaxmoe.contrib.survival.links.probe import LinkProbe, Rounds
from jaxmoe.contrib.survival.links.watch import LinkWatch
from jaxmoe.planning.network.links import REACHES, AxisSize, Link, LinkTable
from jaxmoe.run.directory import RunDirectory
from sharding.mesh import MeshConfig, make_mesh

SMALL_BYTES = 1
_MIB = 1 << 20
_COLUMNS = 16
"""Devices of the printed table."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LinksRunConfig:
    """Where the measurements go."""

    directory: str = "runs/doctor/links"
    """Directory of links.json and summary.json."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LinksConfig:
    """Mesh and messages to measure."""

    run: LinksRunConfig = LinksRunConfig()
    """Where the measurements go."""
    mesh: MeshConfig = MeshConfig(data=-1)
    """Mesh whose neighbours are measured."""
    message_bytes: int | None = None
    """Bytes of the large message; 16 MiB when None, 1 MiB on CPUs."""
    repeats: int = 5
    """Times that each message is sent in a measurement; the shortest counts."""
    measurements: int = 3
    """Measurements; a fault must be in three of them, or in two if it is large."""
    rounds: Rounds = "together"
    """Messages at the same time: as many as have no device in common, or a single one, which is
    exact where devices share a processor or bus, and compiles a program for every link."""
    pairs: Literal["neighbours", "processes"] = "neighbours"
    """Links to measure: those between neighbours of the mesh, or those between all processes too,
    from which --network.hosts measured of `plan` orders the hosts."""
    timeout: float = 600.0
    """Seconds after which devices that do not answer are a problem."""

    def __post_init__(self):
        if self.message_bytes is not None and self.message_bytes <= SMALL_BYTES:
            raise ValueError(f"message_bytes={self.message_bytes} must be above {SMALL_BYTES}")
        for field in ("repeats", "measurements"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}={getattr(self, field)} must be at least 1")
        check_timeout(self.timeout)


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    prog = "jaxmoe doctor --links"
    config = flags.parse_flags(LinksConfig(), argv, prog, __doc__ or "")
    directory = RunDirectory(config.run.directory)
    with flags.exit_on_bad_configuration():
        directory.check_free_of_runs()
        start_process(needs_devices=False)
        mesh = make_mesh(config.mesh)
        if mesh.size == 1:
            raise ValueError("mesh has one device, which has no links: run it on several")
    with answer_within(config.timeout):
        table, matrices, findings = measure(mesh, config)
    if jax.process_index() != 0:
        return _exit_code(findings)
    write("\n".join(page_lines(table, matrices[-1], findings)))
    with flags.exit_on_bad_configuration(), directory.held():
        table.save(directory.links_file)
        directory.write_summary(
            {
                "status": "problems" if findings else "done",
                "findings": [dataclasses.asdict(finding) for finding in findings],
                "links": len(table.links),
            }
        )
    write(f"wrote {directory.links_file}")
    return _exit_code(findings)


def measure(mesh: Mesh, config: LinksConfig) -> tuple[LinkTable, list[LinkMatrix], list[Finding]]:
    """Return the shortest times, the matrices of the large message, and what is slow.

    Args:
        mesh: Devices.
        config: Messages.
    """
    devices = list(mesh.devices.flat)
    large = config.message_bytes or (_MIB if devices[0].platform == "cpu" else 16 * _MIB)
    numbers = [device.id for device in devices]
    processes = [device.process_index for device in devices]
    matrices: dict[int, list[LinkMatrix]] = {}
    warnings: list[str] = []
    for size in (SMALL_BYTES, large):
        probe = LinkProbe(
            mesh,
            size,
            repeats=config.repeats,
            rounds=config.rounds,
            processes=processes if config.pairs == "processes" else None,
        )
        watch = LinkWatch()
        slow = []
        matrices[size] = [probe.measure() for _ in range(config.measurements)]
        for matrix in matrices[size]:
            slow += watch.window(matrix)
        process_of = dict(zip(numbers, processes, strict=True))
        warnings += [
            f"{line} (messages of {_size(size)})"
            for line in faults.in_words(slow, numbers, process_of)
        ]
    shape = matrices[large][0]
    small_seconds, large_seconds = (
        np.min([matrix.seconds for matrix in matrices[size]], axis=0)
        for size in (SMALL_BYTES, large)
    )
    links = tuple(
        Link(
            axis=shape.rows[row],
            source=numbers[place],
            target=numbers[shape.targets[row, place]],
            reach=REACHES[shape.reaches[row, place]],
            small_seconds=float(small_seconds[row, place]),
            large_seconds=float(large_seconds[row, place]),
        )
        for row in range(len(shape.rows))
        if shape.rows[row] != ALONE
        for place in range(mesh.size)
    )
    table = LinkTable(
        device_kind=devices[0].device_kind,
        mesh=tuple(AxisSize(axis=axis, size=size) for axis, size in mesh.shape.items()),
        processes=tuple(processes),
        devices=tuple(numbers),
        small_bytes=SMALL_BYTES,
        large_bytes=large,
        links=links,
    )
    remedy = "leave it out (launch --supervise --exclude PROCESS) or repair it, and measure again"
    return table, matrices[large], [Finding("problem", "links", text, remedy) for text in warnings]


def page_lines(table: LinkTable, matrix: LinkMatrix, findings: Sequence[Finding]) -> list[str]:
    """Return the printed lines: rates by axis, times by axis and device, findings.

    Args:
        table: Measured links.
        matrix: A measurement of the large message.
        findings: What is slow.
    """
    lines = []
    for axis_row in table.mesh:
        if (rate := table.axis_rate(axis_row.axis)) is not None:
            count = sum(link.axis == axis_row.axis for link in table.links)
            text = f"{axis_row.axis}={axis_row.size}: {count} links,"
            text += f" latency {1e6 * rate.latency:.1f} us, {rate.bandwidth / 1e9:.2f} GB/s"
            lines.append(in_words(Finding("ok", "links", text)))
    shown = table.devices[:_COLUMNS]
    rows = [
        [name, *(f"{1e3 * seconds:.3g}" for seconds in times[: len(shown)])]
        for name, times in zip(matrix.rows, matrix.seconds, strict=True)
    ]
    lines += [
        "",
        f"milliseconds of {_size(table.large_bytes)} from each device to its next neighbour",
    ]
    lines.append(text_table([["axis", *map(str, shown)], *rows]))
    if len(table.devices) > len(shown):
        lines.append(f"(the first {len(shown)} of {len(table.devices)} devices; all in links.json)")
    lines += ["", *map(in_words, findings)]
    if not findings:
        lines.append(in_words(Finding("ok", "links", "no device and no link is slow")))
    return lines


def _size(number: int) -> str:
    return f"{number / _MIB:g} MiB" if number >= _MIB else f"{number} B"


def _exit_code(findings: Sequence[Finding]) -> int:
    return int(ExitCode.BAD_CONFIGURATION if findings else ExitCode.DONE)
