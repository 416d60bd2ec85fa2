# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Parts of a run that a field of its config, an environment variable or its history asks for.

`jaxmoe/run/parts.py` imports a part when it is asked for. To add one: its row in `PARTS`, at its
place in the order. A part that the tuple `parts` of a config names is a row of `runs.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Final

PARTS: Final[tuple[tuple[Callable[[Any], object], str], ...]] = (
    (
        lambda config: os.environ.get("JAXMOE_ELASTIC"),
        "jaxmoe.contrib.elastic.shrink:Shrink",
    ),
    (
        lambda config: getattr(config.data, "partition", None),
        "jaxmoe.contrib.ensembles.kept_partition:KeptPartition",
    ),
    (
        lambda config: config.execution.optimizer_memory == "files",
        "jaxmoe.contrib.offload.optimizer_files:OptimizerFiles",
    ),
    (
        lambda config: config.replicas.exchanges != "nothing",
        "jaxmoe.contrib.slow_links.run_part:ReplicasPart",
    ),
    (
        lambda config: os.environ.get("JAXMOE_ISLAND"),
        "jaxmoe.contrib.slow_links.site_part:Site",
    ),
    (
        lambda config: config.execution.telemetry == "detailed",
        "jaxmoe.contrib.telemetry.part:Telemetry",
    ),
)
"""What asks for a part, and the address of its class, in the order in which the parts act."""

FILES: Final = {
    "indicators.npz": (
        "jaxmoe.contrib.telemetry.part:Telemetry",
        "jaxmoe.contrib.telemetry.pictures:indicators_of_run",
    ),
    "congestion.npz": (
        "jaxmoe.contrib.telemetry.part:Telemetry",
        "jaxmoe.contrib.telemetry.pictures:congestion_of_run",
    ),
}
"""Files of the run directory with records of a part, which belongs to the run once they are there:
its address, and that of a function (directory, metrics) that returns a section of the report as
HTML. A branch of the run goes on with copies of the files."""

COMPARED: Final = {
    "indicators.npz": "jaxmoe.contrib.telemetry.pictures:indicators_by_size",
}
"""Files of run directories with records that the page on several runs compares: the address of a
function (recorded runs with the file, by name, the smallest model first) that returns a section as
HTML."""

HISTORY: Final = {"averaged": "check_free"}
"""Events of lineage.json after which a part, by its name in `runs.py`, belongs to the run whatever
its config says."""

REQUESTS: Final = {"resize.json": "jaxmoe.contrib.elastic.resizing:Resizing"}
"""Files of the run directory that ask for a part while the run trains."""
