# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""No method: the mesh axis `replica` splits the batch, and gradients are summed in every step."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from jaxmoe.replicas.kind import ReplicasKind


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SynchronousConfig(ReplicasKind):
    """Sums gradients over all devices in every step."""

    name: ClassVar[str] = "none"
    exchanges: ClassVar[Literal["nothing", "parameters", "gradients"]] = "nothing"

    def num_workers(self, places: int) -> int:
        """Return 1: all devices train one copy of the parameters."""
        del places
        return 1
