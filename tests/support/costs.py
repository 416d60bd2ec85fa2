# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Records what each test costs, and prints the costs as a table.

    pytest --costs FILE                        records a run, as JSON
    python -m tests.support.costs FILE         the table of it: by folder, files, tests and programs
    python -m tests.support.costs FILE OLDER   the same, and that of an older run

A cost is a sum over the phases of a test (set-up with its fixtures, call, teardown): wall seconds,
processor seconds of this process and of the commands that it waited for, processes started,
programs that XLA compiled or read from the cache and how long that took. What remains of the wall
seconds is Python, tracing among it, and waiting.
"""

from __future__ import annotations

import collections
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import pytest

FIELDS = ("wall", "setup", "processor", "processes", "programs", "compiling", "hits", "tracing")
_STARTS = ("subprocess.Popen", "os.fork", "os.posix_spawn")
_DURATIONS = {
    "/jax/core/compile/backend_compile_duration": "compiling",
    "/jax/core/compile/jaxpr_trace_duration": "tracing",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "tracing",
}


class Recorder:
    """A plugin of pytest that adds up the costs of each test of one process."""

    def __init__(self) -> None:
        self.costs: dict[str, dict[str, float]] = {}
        self.failed: set[str] = set()
        self._counts: collections.Counter[str] = collections.Counter()
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)
        jax.monitoring.register_event_listener(self._on_event)
        sys.addaudithook(self._on_audit)

    def _on_duration(self, event: str, seconds: float, **kwargs: Any) -> None:
        if field := _DURATIONS.get(event):
            self._counts[field] += seconds
            self._counts["programs"] += field == "compiling"

    def _on_event(self, event: str, **kwargs: Any) -> None:
        self._counts["hits"] += event == "/jax/compilation_cache/cache_hits"

    def _on_audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event in _STARTS:
            self._counts["processes"] += 1

    def _phase(self, item: pytest.Item, phase: str):
        self._counts.clear()
        wall, processor = time.perf_counter(), sum(os.times()[:4])
        try:
            return (yield)
        finally:
            seconds = time.perf_counter() - wall
            cost = self.costs.setdefault(item.nodeid, dict.fromkeys(FIELDS, 0.0))
            cost["wall"] += seconds
            cost["processor"] += sum(os.times()[:4]) - processor
            if phase == "setup":
                cost["setup"] += seconds
            for field, count in self._counts.items():
                cost[field] += count

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item):
        return (yield from self._phase(item, "setup"))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        return (yield from self._phase(item, "call"))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item):
        return (yield from self._phase(item, "teardown"))

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.failed.add(report.nodeid)

    def pytest_sessionfinish(self, session):
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["costs"] = self.costs

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        self.costs.update(getattr(node, "workeroutput", {}).get("costs", {}))


def write(path: pathlib.Path, recorder: Recorder, seconds: float) -> None:
    """Write the costs and failures of a run that took so many seconds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tests = {
        name: {field: round(number, 3) for field, number in cost.items()}
        for name, cost in sorted(recorder.costs.items())
    }
    result = {"seconds": round(seconds, 1), "failed": sorted(recorder.failed), "tests": tests}
    path.write_text(json.dumps(result, indent=0) + "\n")


def summed(
    tests: dict[str, dict[str, float]], group: Callable[[str], str]
) -> dict[str, dict[str, float]]:
    """Return the sums of costs by `group(name)`, the dearest first."""
    sums: dict[str, dict[str, float]] = {}
    for name, cost in tests.items():
        row = sums.setdefault(group(name), {"tests": 0, **dict.fromkeys(FIELDS, 0.0)})
        row["tests"] += 1
        for field in FIELDS:
            row[field] += cost[field]
    return dict(sorted(sums.items(), key=lambda row: -row[1]["wall"]))


def table(title: str, sums: dict[str, dict[str, float]], most: int) -> list[str]:
    """Return rows of a Markdown table of the dearest groups, and one of the sum of the others."""
    head = ("tests", "wall s", "set-up s", "processor s", "processes", "programs", "read")
    head += ("compiling s", "tracing s")
    fields = ("tests", "wall", "setup", "processor", "processes", "programs", "hits")
    fields += ("compiling", "tracing")
    lines = [f"| {title} | {' | '.join(head)} |", "| --- |" + " ---: |" * len(head)]
    names = list(sums)
    rows = {name: sums[name] for name in names[:most]}
    if rest := names[most:]:
        rows[f"{len(rest)} others"] = {f: sum(sums[name][f] for name in rest) for f in fields}
    rows["sum"] = {f: sum(row[f] for row in sums.values()) for f in fields}
    for name, row in rows.items():
        lines.append(f"| {name} | " + " | ".join(f"{row[field]:.0f}" for field in fields) + " |")
    return lines


def _folder(name: str) -> str:
    parts = pathlib.PurePosixPath(name.partition("::")[0]).parts
    return "/".join(parts[1:-1][:2]) or "architecture"


def _file(name: str) -> str:
    return name.partition("::")[0].removeprefix("tests/")


def main() -> None:
    """Print the tables of a recorded run, beside those of an older one."""
    for path in sys.argv[1:]:
        run = json.loads(pathlib.Path(path).read_text())
        tests = run["tests"]
        print(f"## {path}: {len(tests)} tests in {run['seconds'] / 60:.1f} minutes\n")
        print(*table("folder", summed(tests, _folder), 40), sep="\n", end="\n\n")
        print(*table("file", summed(tests, _file), 40), sep="\n", end="\n\n")
        print(*table("test", summed(tests, str), 40), sep="\n", end="\n\n")


if __name__ == "__main__":
    main()
