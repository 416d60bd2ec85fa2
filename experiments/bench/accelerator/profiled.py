# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Reads where a step's time goes on a GPU, by kind of kernel, from a trace of the profiler."""

from __future__ import annotations

import collections
import gzip
import json
import pathlib
import re
from typing import Any

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


def kind_of(kernel: str) -> str:
    """Return the kind of a kernel by its name.

    Args:
        kernel: Name as the trace has it.
    """
    small = kernel.lower()
    return next((kind for kind, parts in _KINDS if any(p in small for p in parts)), "other")


def kernel_times(folder: pathlib.Path) -> dict[str, float]:
    """Return milliseconds by name of a kernel, numbers at its end left out, of the last trace.

    Args:
        folder: Directory of the profiler.
    """
    traces = sorted(folder.rglob("perfetto_trace.json.gz"))
    if not traces:
        return {}
    with gzip.open(traces[-1]) as file:
        found: Any = json.load(file)
    events = found["traceEvents"] if isinstance(found, dict) else found
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
    times: dict[str, float] = collections.defaultdict(float)
    for event in events:
        if event.get("ph") != "X" or "GPU" not in processes.get(event["pid"], ""):
            continue
        if "Stream" not in lanes.get((event["pid"], event.get("tid")), "Stream"):
            continue  # lanes of modules and operations repeat the same time
        times[_NUMBER.sub("", event["name"])] += event["dur"] / 1e3
    return dict(times)
