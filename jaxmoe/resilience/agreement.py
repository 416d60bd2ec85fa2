# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Whether all processes of a run were started with the same config, code and versions.

Processes that compile different programs wait for one another in collectives for ever, or compute
nonsense. So each compares with process 0 before anything is compiled, and all of them end when one
differs. What belongs to a process alone (`OWN_FIELDS`) may differ.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import pathlib
import platform
from typing import Any

import jax

from jaxmoe.configs import to_json, varying_fields
from sharding.coordination import everyones_text, first_text

OWN_FIELDS = ("data.cache", "tracking.console", "tracking.trackers", "tracking.sample_length")
"""What only decides what one process writes, or where it keeps its copy."""
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")
_ROOMS = ("pallas_kernels", "sharding", "jaxmoe", "experiments")
_SHOWN = 5


def check_agreement(config: Any, seconds: float) -> None:
    """Every process must call this; with one it does nothing.

    Args:
        config: the resolved config of this process.
        seconds: that processes wait for one another.

    Raises:
        ValueError: on all processes, with each process that differs from process 0, the first
            fields in which it does, and both values.
        AbsentError: a process did not come.
    """
    if jax.process_count() == 1:
        return
    own = facts(config)
    first = json.loads(first_text("the config of process 0", json.dumps(own), seconds))
    lines = disagreement(first, own)
    said = everyones_text("the comparison of configs", json.dumps(lines), seconds)
    differing = {process: json.loads(text) for process, text in enumerate(said)}
    differing = {process: lines for process, lines in differing.items() if lines}
    if differing:
        shown = [
            f"process {process}: {line}"
            for process, lines in list(differing.items())[:_SHOWN]
            for line in lines
        ]
        raise ValueError(
            f"{len(differing)} of {jax.process_count()} processes were not started like process 0:"
            "\n  " + "\n  ".join(shown) + "\nstart the same command, code and packages everywhere"
        )


def facts(config: Any) -> dict[str, Any]:
    """What must be the same on all processes, as JSON."""
    tree = to_json(config)
    for path in OWN_FIELDS:
        group, _, field = path.partition(".")
        if isinstance(tree.get(group), dict):
            tree[group] = {name: value for name, value in tree[group].items() if name != field}
    versions = {name: importlib.metadata.version(name) for name in _PACKAGES}
    software = {"python": platform.python_version(), "code": code_hash(), **versions}
    return {**tree, "software": software}


def disagreement(first: dict[str, Any], own: dict[str, Any]) -> list[str]:
    """The first fields in which two processes differ, with the value here and that of process 0.

    Args:
        first: `facts` of process 0.
        own: of this process.
    """
    fields = varying_fields([first, own])
    lines = [
        f"{path} is {here}, on process 0 {there}"
        for path, (there, here) in list(fields.items())[:_SHOWN]
    ]
    more = len(fields) - len(lines)
    return [*lines, f"and {more} more fields"] if more > 0 else lines


def code_hash() -> str:
    """Of the sources of this library, as they lie on this host."""
    root = pathlib.Path(__file__).resolve().parents[2]
    total = hashlib.sha256()
    for room in _ROOMS:
        for file in sorted((root / room).rglob("*.py")):
            total.update(str(file.relative_to(root)).encode())
            total.update(file.read_bytes())
    return total.hexdigest()[:12]
