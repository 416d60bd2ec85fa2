# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Base of the batching policies that only a simulator can run."""

from __future__ import annotations

import dataclasses

from jaxmoe.serve.policies.batching.base import BatchingConfig


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedBatchingConfig(BatchingConfig):
    """A batching policy that needs what no executor computes so far."""
