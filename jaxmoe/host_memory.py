# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Memory of this host, or of the control group of this process if that has less.

    machine_memory()    bytes there are
    memory_left()       bytes that are free when this process needs most
    return_memory()     gives the system what this process has freed

On systems without /proc only the first is known. glibc keeps the many small buffers that a save has
freed, in pieces that the next save cannot use whole: five saves of a state of 1.07 GB left 0.5,
0.6, 0.6, 1.4 and 1.4 GB behind, and none where they were returned.
"""

from __future__ import annotations

import ctypes
import functools
import os
import pathlib
import re
from collections.abc import Callable, Iterator

_GROUPS = pathlib.Path("/sys/fs/cgroup")
_PROCESS = pathlib.Path("/proc/self")
_MACHINE = pathlib.Path("/proc/meminfo")


def machine_memory() -> int:
    """Return the bytes of the machine, or of the control group of this process if it is less."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([memory, *(limit for limit, _ in _groups())])


def memory_left() -> int | None:
    """Return the bytes that were free if this process took as much as it ever did, at least 0.

    None where the system does not say.
    """
    machine, process = _numbers(_MACHINE), _numbers(_PROCESS / "status")
    if not {"MemAvailable"} <= machine.keys() or not {"VmRSS", "VmHWM"} <= process.keys():
        return None
    free = min([machine["MemAvailable"], *(limit - usage for limit, usage in _groups())])
    return max(0, free - (process["VmHWM"] - process["VmRSS"]))


def return_memory() -> None:
    """Return the memory that this process has freed to the system, where the C library can."""
    if trim := _trim():
        trim(0)


@functools.cache
def _trim() -> Callable[[int], object] | None:
    """Return the function of glibc; None with another library."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):
        return None


def _groups() -> Iterator[tuple[int, int]]:
    """Yield limit and use of the control groups of this process, of both versions, that have a
    limit; files that the kernel can drop do not count as used."""
    for group in _own_groups():
        for limit_name, used_name, cache_name in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit, usage = _text(group / limit_name), _text(group / used_name)
            if limit.isdigit() and usage.isdigit():
                cache = re.search(rf"^{cache_name} (\d+)$", _text(group / "memory.stat"), re.M)
                yield int(limit), int(usage) - (int(cache[1]) if cache else 0)


def _own_groups() -> Iterator[pathlib.Path]:
    """Yield the directories that may describe the groups of this process; in a container its own
    group is the root."""
    yield from (_GROUPS, _GROUPS / "memory")
    for line in _text(_PROCESS / "cgroup").splitlines():
        _, kinds, path = line.split(":", 2)
        if kinds in ("", "memory"):  # a group above may have less
            group = pathlib.PurePosixPath(path.lstrip("/"))
            yield from (_GROUPS / kinds / part for part in (group, *group.parents))


def _numbers(path: pathlib.Path) -> dict[str, int]:
    """Return the bytes of the lines `name: number kB` of a file."""
    return {name: int(number) << 10 for name, number in _LINE.findall(_text(path))}


_LINE = re.compile(r"^(\w+):\s+(\d+) kB$", re.M)


def _text(path: pathlib.Path) -> str:
    """Return the text of a file; empty where there is none."""
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""
