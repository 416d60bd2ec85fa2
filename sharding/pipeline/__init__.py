# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Pipelines: schedules of micro-batches over the mesh axis `stage`.

To add a schedule: a file in sharding/pipeline/ with a config class that extends `PipelineOrder` (as
sharding/pipeline/gpipe.py), its row under `pipeline` in jaxmoe/catalog/executions.py, a row in
CONFIGS of tests/sharding/pipeline/test_schedule.py.
"""

from pallas_kernels.public_names import load_when_used

load_when_used(__name__)
