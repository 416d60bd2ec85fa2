# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Ulysses inside, a ring outside: more devices than heads can be exchanged among.

mesh.seq = R x U, U the faster. With c tokens, n query and m key heads on each device:

    all-to-all over U    [B c n H] -> [B U c n/U H]      (U - 1)/U c H b (2 n + 2 m) bytes
    ring over R          of U c tokens and m/U key heads   (R - 1) c 2 m H b
    all-to-all back

The layout is that of the ring, with R ranks; the devices of U hold equal parts of what a rank has.
Source: USP, arXiv 2405.07719. The mesh cuts the axis: `fold.seq_inner` is U.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import ClassVar

import jax
import numpy as np
from jaxtyping import Array, Int

from pallas_kernels.ring_attention.api import Directions, Transport
from pallas_kernels.sequence_layout import SequenceLayout
from sharding.sequence_parallel.all_gather import observe_gathered
from sharding.sequence_parallel.form import HeldAttention, RingMessage, SequenceForm, gather_tokens
from sharding.sequence_parallel.local_attention import Seen
from sharding.sequence_parallel.ring import RingConfig
from sharding.sequence_parallel.sizes import AttentionSizes
from sharding.sequence_parallel.ulysses import UlyssesConfig, to_heads, to_positions


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class UlyssesRingConfig(SequenceForm):
    """Heads exchanged among few devices, keys sent round between such groups."""

    name: ClassVar[str] = "usp"

    ulysses: int = 2
    """Devices among which heads are exchanged; fold.seq_inner must be the same."""
    layout: SequenceLayout = "zigzag"
    """Which tokens a rank of the ring holds; see `ring`."""
    directions: Directions = "one"
    """Direction of travel; see `ring`."""
    transport: Transport = "ppermute"
    """How keys travel; see `ring`."""

    def __post_init__(self):
        if self.ulysses < 2:
            raise ValueError(
                f"sequence_parallel.ulysses={self.ulysses} must be at least 2: with 1 it is ring"
            )

    @property
    def ring(self) -> RingConfig:
        """Ring between groups."""
        return RingConfig(layout=self.layout, directions=self.directions, transport=self.transport)

    def token_order(
        self,
        length: int,
        ranks: int,
        segment_ids: Int[Array, "B S"] | None = None,
        arrays: Mapping[str, Array] = MappingProxyType({}),
    ) -> Int[np.ndarray, " S"] | Int[Array, "B S"] | None:
        """Return the order of a ring of groups of devices; see the base class."""
        groups = ranks if ranks == 1 else ranks // self.ulysses
        return self.ring.token_order(length, groups, segment_ids, arrays)

    def check_pieces(self, sizes: Mapping[str, int]) -> None:
        """Check that mesh.seq is in two pieces, the ring and the exchange.

        Raises:
            ValueError: It is not.
        """
        if len(sizes) != 2 or [*sizes.values()][1] != self.ulysses:
            alone = [*sizes.values()] == [self.ulysses]
            raise ValueError(
                f"execution.sequence_parallel 'usp' needs mesh.seq in two pieces, the faster of"
                f" {self.ulysses} (sequence_parallel.ulysses), and the mesh has"
                f" {' x '.join(f'{a}={n}' for a, n in sizes.items())}: set fold.seq_inner to"
                f" {self.ulysses}, and fold.expert x fold.expert_tensor so that it cuts seq"
                f" nowhere else{'; or take ulysses, which it is with one piece' * alone}"
            )

    def check_heads(self, sizes: AttentionSizes) -> None:
        """Check that `ulysses` divides the ranks and the heads of a device.

        Raises:
            ValueError: It does not.
        """
        possible = [n for n in sizes.exchangeable if n > 1 and sizes.ranks % n == 0]
        if self.ulysses in possible:
            shared = sizes.tensor * self.ulysses  # the ring has the heads left by the exchange
            groups = sizes.ranks // self.ulysses
            self.ring.check_heads(dataclasses.replace(sizes, tensor=shared, ranks=groups))
            return
        ways = "execution.sequence_parallel to ring"
        if possible:
            counts = " or ".join(map(str, possible))
            ways = f"sequence_parallel.ulysses and fold.seq_inner to {counts}, or {ways}"
        raise ValueError(
            f"mesh.seq={sizes.ranks}, and the {sizes.local_heads} query and"
            f" {sizes.local_kv_heads} key heads of a device, must be divisible by"
            f" execution.sequence_parallel.ulysses={self.ulysses}: set {ways}"
        )

    def attend(self, inputs: HeldAttention) -> tuple[Array, Seen]:
        """Return attention of some heads over keys that pass by, exchanged back."""
        outer, inner = self._two_axes(inputs.cut.axes)
        shared = gather_tokens(inputs.tokens, inner)
        qs, ks, vs = (to_heads(x, inner) for x in inputs[:3])
        exchanged = inputs._replace(q=qs, k=ks, v=vs, tokens=shared)
        out, sums = self.ring.attend_along(exchanged, axis=outer)
        by_token = {name: to_heads(part, inner) for name, part in sums.items()}
        return to_positions(out, inner), observe_gathered(inputs, self) | by_token

    def _two_axes(self, axes: tuple[str, ...]) -> tuple[str, str]:
        """Return the axis of the ring and that of the exchange, the faster one."""
        self.check_pieces({axis: jax.lax.axis_size(axis) for axis in axes})
        return axes[0], axes[1]

    def _messages(self, sizes: AttentionSizes, is_backward: bool) -> Iterator[RingMessage]:
        """Yield exchanges within groups of neighbours, and rings across groups."""
        yield from self._exchanges(sizes, is_backward)
        inner = self.ulysses
        groups = sizes.ranks // inner
        ring = dataclasses.replace(sizes, ranks=groups, sequences=sizes.sequences / inner)
        for message in self.ring.messages(ring, is_backward=is_backward):
            pairs = ((i * inner + u, j * inner + u) for u in range(inner) for i, j in message.pairs)
            yield RingMessage(message.bytes, tuple(pairs))

    def _exchanges(self, sizes: AttentionSizes, is_backward: bool) -> Iterator[RingMessage]:
        """Yield exchanges within groups of neighbours."""
        inner = self.ulysses
        groups = range(sizes.ranks // inner)
        length = sizes.length // len(groups)
        part = dataclasses.replace(sizes, ranks=inner, length=length, is_causal=False)
        for message in UlyssesConfig().messages(part, is_backward=is_backward):
            pairs = ((g * inner + i, g * inner + j) for g in groups for i, j in message.pairs)
            yield RingMessage(message.bytes, tuple(pairs))

    def repeated_messages(self, sizes: AttentionSizes) -> Iterator[RingMessage]:
        """Yield the exchanges within groups, which are before the ring and after it."""
        return iter(()) if sizes.ranks == 1 else self._exchanges(sizes, False)

    def num_repeated(self, sizes: AttentionSizes) -> int:
        """Return four messages within the group."""
        del sizes
        return 4 * (self.ulysses - 1)

    def num_messages(self, sizes: AttentionSizes, *, is_backward: bool) -> int:
        """Return four messages within the group, and those of the ring."""
        groups = dataclasses.replace(sizes, ranks=sizes.ranks // self.ulysses)
        ring = self.ring.num_messages(groups, is_backward=is_backward)
        return self.num_repeated(sizes) + ring
