# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""No sequence parallelism: every device holds whole sequences, heads may be spread."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from jaxtyping import Array, Float

from pallas_kernels.sequence_layout import SequenceLayout
from sharding.sequence_parallel.local_attention import (
    AttentionRules,
    HeldTokens,
    Seen,
    attend_locally,
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NoSequenceParallelConfig:
    """Whole sequences on every device; mesh.seq must be 1."""

    name: ClassVar[str] = "none"
    layout: ClassVar[SequenceLayout] = "contiguous"
    """Which tokens a device holds."""


def attend_whole(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B S M H"],
    v: Float[Array, "B S M Hv"],
    tokens: HeldTokens,
    rules: AttentionRules,
) -> tuple[Float[Array, "B S N Hv"], Seen]:
    """Attention over whole sequences.

    Args:
        q: queries.
        k: keys.
        v: values.
        tokens: where they stand.
        rules: of the mask.
    """
    return attend_locally(q, k, v, tokens, tokens, rules)
