# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""No sequence parallelism: every device holds whole sequences; heads may be sharded."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from jaxtyping import Array

from pallas_kernels.sequence_layout import SequenceLayout
from sharding.sequence_parallel.form import HeldAttention, SequenceForm
from sharding.sequence_parallel.local_attention import Seen
from sharding.sequence_parallel.sizes import AttentionSizes


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NoSequenceParallelConfig(SequenceForm):
    """Whole sequences on every device; mesh.seq must be 1."""

    name: ClassVar[str] = "none"
    layout: ClassVar[SequenceLayout] = "contiguous"

    def check_heads(self, sizes: AttentionSizes) -> None:
        """Refuse any sharded sequence."""
        if sizes.ranks != 1:
            raise _refusal(sizes.ranks)

    def attend(self, arrays: HeldAttention) -> tuple[Array, Seen]:
        """Refuse sharded sequences; whole ones need no form."""
        raise _refusal(arrays.cut.length // arrays.cut.held)


def _refusal(parts: int) -> ValueError:
    """Return the error for sequences in parts."""
    return ValueError(
        f"mesh.seq cuts sequences into {parts} parts, and this form has whole ones: set mesh.seq"
        " to 1, or choose another form, such as auto"
    )
