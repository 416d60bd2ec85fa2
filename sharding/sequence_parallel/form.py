# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Base classes of the sequence-parallel configs: what the rest of the library asks of one.

`SequenceParallelism` is any choice, `auto` included; `SequenceForm` one that attention can run.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.sequence_layout import SequenceLayout, sequence_order
from sharding.fold import MoEMesh
from sharding.sequence_parallel.local_attention import AttentionRules, HeldTokens, Seen
from sharding.sequence_parallel.sizes import AttentionSizes


class TokenOrder(NamedTuple):
    """Order of the tokens in rows that devices share."""

    tokens: Int[np.ndarray, " S"] | Int[Array, "B S"]
    """Token at each place of a row: known while tracing, or an array where rows differ."""
    arrays: dict[str, Array] = {}
    """Arrays of `SequenceForm.reads` on which the order depends; the form attends by them too."""

    @property
    def by_row(self) -> Int[Array, "B S"] | None:
        """The tokens, where they are an array of one order per row."""
        return self.tokens if isinstance(self.tokens, jax.Array) else None


class RingMessage(NamedTuple):
    """One message of equal size between some pairs of ranks."""

    bytes: float
    pairs: tuple[tuple[int, int], ...]
    """(from, to)."""


class SequenceParallelism(abc.ABC):
    """How attention spreads the positions of a sequence."""

    __slots__ = ()

    name: ClassVar[str]
    """Name in configs and flags."""

    @abc.abstractmethod
    def choose(self, sizes: AttentionSizes) -> FormChoice:
        """Return the form that runs, and the reason.

        Args:
            sizes: Sizes of the attention layer.
        """

    def mesh_fold(self, fold: MoEMesh | None, seq: int) -> MoEMesh | None:
        """Return the fold of the mesh, with the cuts of mesh.seq that this form needs.

        Args:
            fold: execution.fold.
            seq: mesh.seq; -1 if it is open.
        """
        del seq
        return fold


class SequenceForm(SequenceParallelism):
    """One form of sequence parallelism."""

    __slots__ = ()

    layout: SequenceLayout
    """Which tokens a device holds."""
    reads: ClassVar[tuple[str, ...]] = ()
    """Names of scalars of a micro-batch, the same on all devices, by which rows are laid out."""

    def choose(self, sizes: AttentionSizes) -> FormChoice:
        """Return this form; its name is the reason."""
        del sizes
        return FormChoice(config=self, reason=self.name, bytes={})

    def token_order(
        self,
        length: int,
        ranks: int,
        segment_ids: Int[Array, "B S"] | None = None,
        arrays: Mapping[str, Array] = MappingProxyType({}),
    ) -> Int[np.ndarray, " S"] | Int[Array, "B S"] | None:
        """Return the token held at each position of a laid out row; None: rows are unchanged.

        Args:
            length: Tokens of a row.
            ranks: Devices that share a row.
            segment_ids: Document of each token, in the order of the tokens; only document_zigzag
                reads them, and returns an order for every row then.
            arrays: Those of `reads` that the micro-batch has; the order is an array [S] then.

        Raises:
            ValueError: The length is not divisible.
        """
        del arrays
        if ranks == 1 or self.layout == "contiguous":
            return None
        if self.layout != "document_zigzag":
            segment_ids = None
        return sequence_order(length, ranks, self.layout, segment_ids)

    def check(self, sizes: AttentionSizes) -> None:
        """Check that this form can spread the heads and the length.

        Args:
            sizes: Sizes of the attention layer.

        Raises:
            ValueError: It cannot; the message names the field, both sizes and the way out.
        """
        ranks = sizes.ranks
        if ranks == 1:
            return
        self.check_heads(sizes)
        pieces = ranks if self.layout == "contiguous" else 2 * ranks
        if sizes.length % pieces:
            padded = -(-sizes.length // pieces) * pieces
            way = ", or set execution.sequence_parallel.layout to contiguous"
            raise ValueError(
                f"sequences of {sizes.length} tokens must be divisible by {pieces} ({self.layout}"
                f" over mesh.seq={ranks}): pad to {padded}"
                + (way if self.layout != "contiguous" and sizes.length % ranks == 0 else "")
            )

    def check_pieces(self, sizes: Mapping[str, int]) -> None:
        """Check the pieces into which a fold cuts the axis of positions, where it is cut.

        Args:
            sizes: {mesh axis: size}, the slowest first.
        """

    def check_heads(self, sizes: AttentionSizes) -> None:
        """Check the heads alone, on more than one device; see `check`."""

    @abc.abstractmethod
    def attend(self, inputs: HeldAttention) -> tuple[Array, Seen]:
        """Return attention of the queries of this device. Called inside a region.

        Args:
            inputs: Arrays of this device.

        Returns:
            The output and, if observed, the watched logits.
        """

    def messages(self, sizes: AttentionSizes, *, is_backward: bool) -> Iterator[RingMessage]:
        """Yield every message of one layer.

        Args:
            sizes: Sizes of the attention layer.
            is_backward: Backward pass instead of the forward one.
        """
        return iter(()) if sizes.ranks == 1 else self._messages(sizes, is_backward)

    def _messages(self, sizes: AttentionSizes, is_backward: bool) -> Iterator[RingMessage]:
        """Yield every message between more than one rank."""
        del sizes, is_backward
        return iter(())

    def repeated_messages(self, sizes: AttentionSizes) -> Iterator[RingMessage]:
        """Yield the forward messages that a backward pass sends again where it computes a layer
        again, and only finds the results of its attention kernel (`name_results`).

        All of them, where queries and keys travel before the kernel, or its results after it.

        Args:
            sizes: Sizes of the attention layer.
        """
        return self.messages(sizes, is_backward=False)

    def num_repeated(self, sizes: AttentionSizes) -> int:
        """Return the messages of `repeated_messages`, counted as by `num_messages`.

        Args:
            sizes: Sizes of the attention layer.
        """
        return self.num_messages(sizes, is_backward=False)

    def num_messages(self, sizes: AttentionSizes, *, is_backward: bool) -> int:
        """Return the messages that a rank sends in one layer, counting each of its arrays.

        Args:
            sizes: Sizes of the attention layer.
            is_backward: Backward pass instead of the forward one.
        """
        return 2 * len(list(self.messages(sizes, is_backward=is_backward)))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FormChoice:
    """A form and the reason for it."""

    config: SequenceForm
    reason: str
    """One sentence."""
    bytes: dict[str, float]
    """For every form that can run the bytes of a layer, forward and backward, over the busiest link
    in its busiest direction; empty if there was no choice."""


@dataclasses.dataclass(frozen=True, slots=True)
class Cut:
    """How sequences are sharded inside a region."""

    axes: tuple[str, ...]
    """Mesh axes over which positions are sharded."""
    length: int
    """Tokens of a whole row."""
    held: int
    """Tokens of a row on one device."""

    def with_positions(self, tokens: HeldTokens, form: SequenceForm) -> HeldTokens:
        """Return the tokens with their places in the row as positions, where none are given.

        Args:
            tokens: Tokens of this device.
            form: The form that laid them out.
        """
        if tokens.positions is not None:
            return tokens
        ranks = self.length // self.held
        order: Any = form.token_order(self.length, ranks)
        places = np.arange(self.length, dtype=np.int32) if order is None else order
        positions = jnp.asarray(places.reshape(ranks, self.held))[jax.lax.axis_index(self.axes)]
        return HeldTokens(positions, tokens.segment_ids)

    def ring_axis(self, form: SequenceForm) -> str:
        """Return the one mesh axis along which a ring runs.

        Args:
            form: The form, for the error.

        Raises:
            ValueError: A fold has cut the axis into pieces.
        """
        return ring_axis({axis: jax.lax.axis_size(axis) for axis in self.axes}, form)


def ring_axis(sizes: Mapping[str, int], form: SequenceForm) -> str:
    """Return the one mesh axis along which a ring runs.

    Args:
        sizes: {mesh axis over which positions are sharded: size}.
        form: The form, for the error.

    Raises:
        ValueError: A fold has cut the axis into pieces.
    """
    cut = [axis for axis, size in sizes.items() if size > 1]
    if len(cut) > 1:
        raise ValueError(
            f"execution.fold cuts mesh.seq into {' x '.join(f'{a}={sizes[a]}' for a in cut)},"
            f" and execution.sequence_parallel {form.name!r} needs it in one piece: choose"
            " fold.expert x fold.expert_tensor up to mesh.tensor, or from mesh.tensor x"
            " mesh.seq on; or take all_gather or ulysses"
        )
    return cut[0]


class RingForm(SequenceForm):
    """Base class of the forms whose arrays travel around a ring, inside one kernel."""

    __slots__ = ()

    def check_pieces(self, sizes: Mapping[str, int]) -> None:
        """Check that no fold cuts mesh.seq.

        Raises:
            ValueError: One does.
        """
        ring_axis(sizes, self)

    def repeated_messages(self, sizes: AttentionSizes) -> Iterator[RingMessage]:
        """Yield nothing: what travels, travels in the kernel."""
        del sizes
        return iter(())

    def num_repeated(self, sizes: AttentionSizes) -> int:
        """Return 0."""
        del sizes
        return 0


class HeldAttention(NamedTuple):
    """What a device holds of the attention over sharded sequences."""

    q: Float[Array, "B s N H"]
    k: Float[Array, "B s M H"]
    v: Float[Array, "B s M Hv"]
    tokens: HeldTokens
    """Positions and documents of its tokens; positions None: their places in the row."""
    rules: AttentionRules
    cut: Cut
    arrays: dict[str, Array] = {}
    """`TokenOrder.arrays`."""


def gather_tokens(tokens: HeldTokens, axes: str | tuple[str, ...]) -> HeldTokens:
    """Return positions and documents of the tokens of all devices of these axes.

    Args:
        tokens: Tokens of this device.
        axes: Mesh axes over which positions are sharded.
    """
    return HeldTokens(
        *(
            None if x is None else jax.lax.all_gather(x, axes, axis=x.ndim - 1, tiled=True)
            for x in tokens
        )
    )
