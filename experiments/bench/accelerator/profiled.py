# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Shows where a step's time goes on a GPU, by kind of kernel, from a trace of the profiler."""

from __future__ import annotations

import collections
import gzip
import json
import pathlib
import re
import tempfile
from collections.abc import Callable
from typing import Any

import jax

_NUMBER = re.compile(r"([._]\d+)+$")
_KINDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "ours",
        ("mosaic", "kernel_body", "hopper", "pallas", "grouped", "attention"),
    ),
    ("library products", ("nvjet", "gemm", "cutlass", "cublas", "xmma", "dot", "cudnn")),
    ("copies", ("memcpy", "copy", "memset")),
    ("stacking by loops", ("dynamic_update_slice", "dynamic_slice")),
    ("selects", ("select",)),
    ("sums", ("reduce",)),
    ("zeros", ("broadcast",)),
    ("conversions", ("convert",)),
    ("gathers and scatters", ("gather", "scatter")),
    ("sorting", ("sort",)),
    ("concatenations", ("concatenate",)),
    ("transposes", ("transpose",)),
)


def profile(run: Callable[[], None], steps: int) -> dict[str, Any]:
    """Return the time and the number of kernels of a step, by kind, and its longest kernels.

    Args:
        run: Function that runs the steps and waits for them.
        steps: Number of steps that it runs.
    """
    with tempfile.TemporaryDirectory() as place:
        with jax.profiler.trace(place, create_perfetto_trace=True):
            run()
        kernels = kernel_times(pathlib.Path(place))
    kinds: dict[str, float] = collections.defaultdict(float)
    for name, (milliseconds, _) in kernels.items():
        kinds[kind_of(name)] += milliseconds / steps
    longest = sorted(kernels.items(), key=lambda pair: -pair[1][0])[:40]
    ordered = sorted(kinds.items(), key=lambda pair: -pair[1])
    return {
        "kernels": round(sum(count for _, count in kernels.values()) / steps),
        "device_ms": round(sum(kinds.values()), 3),
        "kinds_ms": {kind: round(milliseconds, 3) for kind, milliseconds in ordered},
        "kernels_ms": {name: round(pair[0] / steps, 3) for name, pair in longest},
    }


def kind_of(kernel: str) -> str:
    """Return the kind of a kernel by its name.

    Args:
        kernel: Name as the trace has it.
    """
    small = kernel.lower()
    return next((kind for kind, parts in _KINDS if any(p in small for p in parts)), "other")


def kernel_times(folder: pathlib.Path) -> dict[str, tuple[float, int]]:
    """Return milliseconds and calls by name of a kernel, numbers at its end left out.

    It reads the last trace.

    Args:
        folder: Directory of the profiler.
    """
    traces = sorted(folder.rglob("perfetto_trace.json.gz"))
    if not traces:
        return {}
    with gzip.open(traces[-1]) as file:
        trace: Any = json.load(file)
    events = trace["traceEvents"] if isinstance(trace, dict) else trace
    processes = {
        event["pid"]: str(event["args"].get("name", ""))
        for event in events
        if event.get("ph") == "M" and event.get("name") == "process_name"
    }
    lanes = {
        (event["pid"], event["tid"]): str(event["args"].get("name", ""))
        for event in events
        if event.get("ph") == "M" and event.get("name") == "thread_name"
    }
    times: dict[str, tuple[float, int]] = {}
    for event in events:
        if event.get("ph") != "X" or "GPU" not in processes.get(event["pid"], ""):
            continue
        if "Stream" not in lanes.get((event["pid"], event.get("tid")), "Stream"):
            continue  # lanes of modules and operations repeat the same time
        name = _NUMBER.sub("", event["name"])
        milliseconds, calls = times.get(name, (0.0, 0))
        times[name] = milliseconds + event["dur"] / 1e3, calls + 1
    return times
