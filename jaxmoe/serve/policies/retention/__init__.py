# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Retention policies: which pages a sequence gets, and what becomes of those of a preempted one.

To add one: a config that extends `RetentionConfig` in a file of its own in this folder, the union
`RetentionUnion` here, its name in the row of RETENTION in `tests/test_architecture.py`, its
property in `tests/jaxmoe/serve/policies/test_retention.py`.
"""

from jaxmoe.configs import registry_of
from jaxmoe.serve.policies.retention.base import RetentionConfig as RetentionConfig
from jaxmoe.serve.policies.retention.lru import LRUConfig as LRUConfig
from jaxmoe.serve.policies.retention.swap_groups import SwapGroupsConfig as SwapGroupsConfig

RetentionUnion = LRUConfig | SwapGroupsConfig

RETENTION = registry_of(RetentionUnion)
