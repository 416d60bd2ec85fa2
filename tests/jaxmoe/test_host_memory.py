# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Memory of a host from files as the kernel writes them; what was freed goes back to it."""

import pathlib
import re
import sys

import pytest

from jaxmoe import host_memory

GIB = 1 << 30


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def host(tmp_path, monkeypatch):
    """A machine with 8 GiB free, and a process that takes 1 GiB and took 3."""
    monkeypatch.setattr(host_memory, "_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(host_memory, "_PROCESS", tmp_path / "process")
    monkeypatch.setattr(host_memory, "_MACHINE", tmp_path / "meminfo")
    write(tmp_path / "meminfo", f"MemTotal: {16 << 20} kB\nMemAvailable:    {8 << 20} kB\n")
    write(tmp_path / "process/status", f"Name:\tx\nVmHWM:\t{3 << 20} kB\nVmRSS:\t{1 << 20} kB\n")
    return tmp_path


def test_a_process_is_counted_with_its_peak(host):
    assert host_memory.memory_left() == 6 * GIB
    write(host / "process/status", f"VmHWM:\t{30 << 20} kB\nVmRSS:\t{1 << 20} kB\n")
    assert host_memory.memory_left() == 0


@pytest.mark.parametrize(
    ("own", "place", "names"),
    [
        ("0::/", "", ("memory.max", "memory.current", "inactive_file")),
        ("0::/jobs/7", "jobs/7", ("memory.max", "memory.current", "inactive_file")),
        ("0::/jobs/7", "jobs", ("memory.max", "memory.current", "inactive_file")),
        (
            "9:cpu:/x\n4:memory:/jobs/7",
            "memory/jobs/7",
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ),
    ],
)
def test_a_control_group_limits_it(host, own, place, names):
    limit, used, cache = names
    write(host / "process/cgroup", own)
    group = host / "groups" / place
    write(group / limit, f"{4 * GIB}\n")
    write(group / used, f"{2 * GIB}\n")
    assert host_memory.memory_left() == 0, "2 GiB are free, and the process took 2 more once"
    write(group / "memory.stat", f"active_file 7\n{cache} {GIB}\n")
    assert host_memory.memory_left() == GIB, "files that can be dropped are free"
    assert host_memory.machine_memory() == 4 * GIB
    write(group / limit, "max\n")
    assert host_memory.memory_left() == 6 * GIB


def test_a_system_without_these_files_says_nothing(host):
    (host / "meminfo").unlink()
    assert host_memory.memory_left() is None and host_memory.machine_memory() > 0


def _resident():
    text = pathlib.Path("/proc/self/status").read_text()
    return int(re.findall(r"VmRSS:\s+(\d+)", text)[0]) << 10


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_freed_pieces_are_returned():
    pieces = [bytearray(60_000) for _ in range(4000)]
    full = _resident()
    del pieces[::2]
    host_memory.return_memory()
    assert _resident() < full - 60_000 * 1000, "half of the 120 MB at least"
    assert len(pieces) == 2000
