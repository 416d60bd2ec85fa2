# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
from jaxmoe.catalog import Registry
from jaxmoe.serve.policies.retention.base import RetentionConfig as RetentionConfig
from jaxmoe.serve.policies.retention.lru import LRURetentionConfig as LRURetentionConfig
from jaxmoe.serve.policies.retention.swap_groups import SwapGroupsConfig as SwapGroupsConfig

RETENTION: Registry
