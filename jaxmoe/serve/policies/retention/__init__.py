# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Retention policies: which pages a sequence gets, and what becomes of those of a preempted one.

To add one: a config that extends `RetentionConfig` in a file of its own in this folder, its row
under `retention` in `jaxmoe/catalog/serving.py`, its
property in `tests/jaxmoe/serve/policies/test_retention.py`.
"""

from jaxmoe.catalog import Registry
from pallas_kernels.public_names import load_when_used

load_when_used(__name__)

RETENTION = Registry("retention")
