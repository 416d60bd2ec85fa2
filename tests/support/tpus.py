# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Describes TPUs with libtpu, for compilation without hardware."""

import math
from typing import Any

import pytest


def described_tpus(monkeypatch: pytest.MonkeyPatch, name: str, **options: Any) -> list[Any]:
    """Return the devices of a topology; skip the test where libtpu is not installed.

    Args:
        monkeypatch: Fixture of the test; libtpu reads the environment.
        name: Topology, such as "v5e:2x4".
        **options: Options of `jax.experimental.topologies.get_topology_desc`.
    """
    pytest.importorskip("libtpu", reason="libtpu compiles for TPUs: pip install 'jaxmoe[plan]'")
    from jax.experimental import topologies

    kind, shape = name.split(":")
    chips = math.prod(map(int, shape.split("x")))
    for variable, value in {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": f"{'v5litepod' if kind == 'v5e' else kind}-{chips}",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }.items():
        monkeypatch.setenv(variable, value)
    described = topologies.get_topology_desc(platform="tpu", topology_name=name, **options)
    return list(described.devices)
