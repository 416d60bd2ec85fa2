# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Checks that all processes of a run have the same config, code and package versions.

Processes that compile different programs hang in collectives or compute wrong numbers. Each process
compares itself with process 0 before anything is compiled, and all raise if one differs. Fields of
one process alone (`OWN_FIELDS`) may differ.
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
"""Fields that may differ: what one process writes, and where it keeps its cache."""
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")
_PACKAGE_FOLDERS = ("pallas_kernels", "sharding", "jaxmoe", "experiments")
_SHOWN = 5


def check_agreement(config: Any, seconds: float) -> None:
    """Raise on all processes if one differs from process 0; every process must call this.

    Args:
        config: Resolved config of this process.
        seconds: Timeout of the exchange between processes.

    Raises:
        ValueError: With the processes that differ, their first differing fields and both values.
        AbsentError: A process did not take part within the timeout.
    """
    own_facts = facts(config)
    first = json.loads(first_text("the config of process 0", json.dumps(own_facts), seconds))
    lines = disagreement(first, own_facts)
    texts = everyones_text("the comparison of configs", json.dumps(lines), seconds)
    differing = {process: json.loads(text) for process, text in enumerate(texts)}
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
    """Return what must be the same on all processes, as JSON."""
    tree = to_json(config)
    for path in OWN_FIELDS:
        group, _, field = path.partition(".")
        if isinstance(tree.get(group), dict):
            tree[group] = {name: value for name, value in tree[group].items() if name != field}
    versions = {name: importlib.metadata.version(name) for name in _PACKAGES}
    software = {"python": platform.python_version(), "code": code_hash(), **versions}
    return {**tree, "software": software}


def disagreement(first: dict[str, Any], own_facts: dict[str, Any]) -> list[str]:
    """Return the first fields in which two processes differ, with both values.

    Args:
        first: `facts` of process 0.
        own_facts: `facts` of this process.
    """
    fields = varying_fields([first, own_facts])
    lines = [
        f"{path} is {own_value}, on process 0 {first_value}"
        for path, (first_value, own_value) in list(fields.items())[:_SHOWN]
    ]
    more = len(fields) - len(lines)
    return [*lines, f"and {more} more fields"] if more > 0 else lines


def code_hash() -> str:
    """Return a hash of this library's sources as installed on this host."""
    root = pathlib.Path(__file__).resolve().parents[2]
    total = hashlib.sha256()
    for folder in _PACKAGE_FOLDERS:
        for file in sorted((root / folder).rglob("*.py")):
            total.update(str(file.relative_to(root)).encode())
            total.update(file.read_bytes())
    return total.hexdigest()[:12]
