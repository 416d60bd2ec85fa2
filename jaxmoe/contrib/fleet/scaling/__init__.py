# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Scaling policies: how many instances, devices and watts a fleet has.

To add one: a config that extends `ScalingConfig` in a file of its own in this folder, its row
under `scaling` in `jaxmoe/catalog/serving.py`, its property in
`tests/jaxmoe/contrib/fleet/test_scaling.py`.
"""

from jaxmoe.catalog import Registry
from pallas_kernels.public_names import load_when_used

load_when_used(__name__)

SCALING = Registry("scaling")
