# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Sizes of one attention layer on a mesh."""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSizes:
    """Sizes of one attention layer on a mesh."""

    num_heads: int
    """Query heads of the model, N."""
    num_kv_heads: int
    """Key heads of the model, M."""
    head_dim: int
    """Width of a head, H."""
    length: int
    """Tokens of a whole sequence, S."""
    ranks: int
    """Devices that share a sequence (mesh.seq)."""
    tensor: int = 1
    """Devices that share the heads (mesh.tensor)."""
    itemsize: int = 2
    """Bytes of an activation."""
    sequences: float = 1
    """Sequences of one device in a micro-batch."""
    is_causal: bool = True
    """A token sees no later one."""
    window: int | None = None
    """Positions that a token sees, itself included; None: all."""
    keeps_order: bool = False
    """Another part of the model needs rows in the order of their tokens."""

    @property
    def ratio(self) -> int:
        """Query heads of one key head."""
        return self.num_heads // self.num_kv_heads

    @property
    def local_tokens(self) -> float:
        """Tokens of a device."""
        return self.sequences * self.length / self.ranks

    @property
    def local_heads(self) -> int:
        """Query heads of a device."""
        return self.num_heads // self.tensor

    @property
    def local_kv_heads(self) -> int:
        """Key heads of a device."""
        return self.num_kv_heads // self.tensor

    @property
    def exchangeable(self) -> list[int]:
        """Numbers of devices among which the heads of a device can be exchanged."""
        most = math.gcd(self.local_heads, self.local_kv_heads)
        return [n for n in range(1, most + 1) if most % n == 0]
