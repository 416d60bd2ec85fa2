# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The sizes that decide whether a form of attention can run, and the refusal in words."""

from __future__ import annotations

import dataclasses
import math

from sharding.sequence_parallel.attend import FixedConfig
from sharding.sequence_parallel.none import NoSequenceParallelConfig
from sharding.sequence_parallel.ulysses import UlyssesConfig
from sharding.sequence_parallel.usp import UlyssesRingConfig


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSizes:
    """One attention layer on a mesh."""

    num_heads: int
    """N of the model."""
    num_kv_heads: int
    """M of the model."""
    head_dim: int
    """H."""
    length: int
    """S of a whole sequence."""
    ranks: int
    """Devices that share a sequence (mesh.seq)."""
    tensor: int = 1
    """Devices that share the heads (mesh.tensor)."""
    itemsize: int = 2
    """Bytes of an activation."""
    sequences: float = 1
    """Of one device in a micro-batch."""
    is_causal: bool = True
    """A token sees no later one."""
    window: int | None = None
    """How many positions back a token sees."""
    keeps_order: bool = False
    """Something else needs rows in the order of their tokens."""

    @property
    def ratio(self) -> int:
        """Query heads of one key head."""
        return self.num_heads // self.num_kv_heads

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


def check_sequences(config: FixedConfig, sizes: AttentionSizes) -> None:
    """Refuses heads or lengths that a form cannot spread.

    Args:
        config: of the form.
        sizes: of the attention.

    Raises:
        ValueError: naming the field, both sizes and the way out.
    """
    ranks = sizes.ranks
    if ranks == 1:
        return
    if isinstance(config, NoSequenceParallelConfig):
        raise ValueError(
            f"mesh.seq={ranks} needs a sequence-parallel attention, and sequence_parallel is"
            " 'none': set mesh.seq to 1, or execution.sequence_parallel to auto"
        )
    if isinstance(config, UlyssesConfig):
        _check_heads(config, sizes)
    if isinstance(config, UlyssesRingConfig):
        _check_pieces(config, sizes)
    pieces = ranks if config.layout == "contiguous" else 2 * ranks
    if sizes.length % pieces:
        padded = -(-sizes.length // pieces) * pieces
        way = ", or set execution.sequence_parallel.layout to contiguous"
        raise ValueError(
            f"sequences of {sizes.length} tokens must be divisible by {pieces} ({config.layout}"
            f" over mesh.seq={ranks}): pad to {padded}"
            + (way if config.layout != "contiguous" and sizes.length % ranks == 0 else "")
        )


def _check_pieces(config: UlyssesRingConfig, sizes: AttentionSizes) -> None:
    possible = [n for n in sizes.exchangeable if n > 1 and sizes.ranks % n == 0]
    if config.ulysses in possible:
        return
    ways = "execution.sequence_parallel to ring"
    if possible:
        some = " or ".join(map(str, possible))
        ways = f"sequence_parallel.ulysses and fold.seq_inner to {some}, or {ways}"
    raise ValueError(
        f"execution.sequence_parallel.ulysses={config.ulysses} must divide mesh.seq={sizes.ranks},"
        f" and the {sizes.local_heads} query and {sizes.local_kv_heads} key heads of a device: set"
        f" {ways}"
    )


def _check_heads(config: UlyssesConfig, sizes: AttentionSizes) -> None:
    possible = sizes.exchangeable
    if sizes.ranks not in possible:
        some = (
            " or ".join(map(str, possible)) if len(possible) < 3 else ", ".join(map(str, possible))
        )
        raise ValueError(
            f"execution.sequence_parallel 'ulysses' exchanges heads over mesh.seq={sizes.ranks},"
            f" and a device has {sizes.local_heads} query and {sizes.local_kv_heads} key heads"
            f" (attention.num_heads={sizes.num_heads}, attention.num_kv_heads="
            f"{sizes.num_kv_heads}, mesh.tensor={sizes.tensor}): set mesh.seq to {some}, or"
            " execution.sequence_parallel to ring or all_gather"
        )
    heads = sizes.local_kv_heads // sizes.ranks
    if heads % config.num_chunks:
        raise ValueError(
            f"execution.sequence_parallel.num_chunks={config.num_chunks} must divide the {heads}"
            f" key heads that a device has after the exchange (attention.num_kv_heads="
            f"{sizes.num_kv_heads}, mesh.tensor={sizes.tensor}, mesh.seq={sizes.ranks})"
        )
