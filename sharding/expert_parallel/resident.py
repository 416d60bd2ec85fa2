# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The resident dispatcher: all tokens are on every device, which computes its own experts.

    y = psum over the expert axes of the sums of the experts held here

Serving computes one row of tokens, which no mesh axis cuts. Weights of experts stay where they are
and no token travels; each device receives 2 (P - 1) / P T D values of the sum.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from sharding.expert_parallel.all_gather import AllGatherConfig
from sharding.expert_parallel.dispatcher import DispatcherTraits


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ResidentConfig(AllGatherConfig):
    """Tokens are whole on every device, sums are added up."""

    name: ClassVar[str] = "resident"
    traits: ClassVar[DispatcherTraits] = DispatcherTraits(has_whole_tokens=True)
