# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Takes the least recently used page; the youngest sequence is computed again."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from jaxmoe.serve.facts import Facts, youngest
from jaxmoe.serve.policies.retention.base import RetentionConfig


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LRURetentionConfig(RetentionConfig):
    """Any pages; a preempted sequence is computed again."""

    name: ClassVar[str] = "lru"

    def facts(self, facts: Facts) -> Facts:
        """Return the facts with pages one by one, and without copies."""
        return dataclasses.replace(facts, victim=youngest, group=1, host_pages=0)
