# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Pipelines: schedules of micro-batches over the mesh axis `stage`.

To add a schedule: a file in sharding/pipeline/ with a config class that has `name`, `chunks`,
`check`, `check_paths` and `schedule` (as sharding/pipeline/gpipe.py), its class in
`PipelineConfig` in sharding/pipeline/__init__.py, a row in REGISTRIES of
tests/test_architecture.py, a row in CONFIGS of tests/sharding/pipeline/test_schedule.py.
"""

import typing

from sharding.pipeline.gpipe import GPipeConfig as GPipeConfig
from sharding.pipeline.interleaved import InterleavedConfig as InterleavedConfig
from sharding.pipeline.paths import Order as Order
from sharding.pipeline.paths import Paths as Paths
from sharding.pipeline.paths import choose_paths as choose_paths
from sharding.pipeline.schedule import Run as Run
from sharding.pipeline.schedule import Schedule as Schedule
from sharding.pipeline.schedule import Work as Work
from sharding.pipeline.slots import Slots as Slots
from sharding.pipeline.slots import plan_slots as plan_slots
from sharding.pipeline.times import forward_schedule as forward_schedule

PipelineConfig = InterleavedConfig | GPipeConfig
"""Order of the micro-batches on the stages of a pipeline."""

PIPELINES: dict[str, type[PipelineConfig]] = {
    member.name: member for member in typing.get_args(PipelineConfig)
}
"""{name: config class}."""
