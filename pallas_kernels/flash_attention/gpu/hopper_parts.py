# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Parts of the Hopper kernels of flash_attention: mask, walk over blocks, loading warpgroup.

hopper.py uses them; pallas_kernels/gpu/hopper_parts.py has the parts shared with other operations.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.array_types import Array
from pallas_kernels.flash_attention.gpu.hopper_tiles import KEPT, filled_width
from pallas_kernels.flash_attention.kernels import AttentionOperands
from pallas_kernels.flash_attention.mask import Rules, Tokens, sees
from pallas_kernels.gpu.hopper_parts import REGISTERS_LOADING, Registers, along, slot_of
from pallas_kernels.jax_versions import mosaic_gpu as plgpu

LOG2_E = math.log2(math.e)


def fill(x: Array) -> Array:
    """Pad [B L N H] to L in whole blocks and H in whole tiles."""
    sizes = (0, -x.shape[1] % KEPT, 0, filled_width(x.shape[3]) - x.shape[3])
    return jnp.pad(x, [(0, size) for size in sizes]) if any(sizes) else x


def fill_last(x: Array) -> Array:
    """Pad [... L] to whole blocks."""
    more = -x.shape[-1] % KEPT
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, more)]) if more else x


def fill_tokens(tokens: Tokens) -> list[Array]:
    """Return the arrays that are not None, padded, as [1 or B, L]."""
    rows = (x.astype(jnp.int32) for x in tokens if x is not None)
    return [fill_last(x if x.ndim == 2 else x[None]) for x in rows]


def logits_of(products: Array, rules: Rules) -> Array:
    """Return scaled and capped logits, in units of log 2."""
    if rules.softcap is None:
        return products * (rules.scale * LOG2_E)
    return jnp.tanh(products * (rules.scale / rules.softcap)) * (rules.softcap * LOG2_E)


def multiply_slope(d_logits: Array, logits: Array, rules: Rules) -> Array:
    """Multiply by the derivative of the cap."""
    if rules.softcap is None:
        return d_logits
    capped = logits * (1.0 / (rules.softcap * LOG2_E))
    return d_logits * (1.0 - capped * capped)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Mask:
    """Mask of a kernel; tokens are references into global memory, [1 or B, L]."""

    rules: Rules
    registers: Registers
    refs: Tokens
    sequence: Any
    """Index of the program's sequence."""
    num_keys: int | None
    """Number of keys without padding; None where there is no padding."""

    def of(self, starts: tuple[Any, Any], shape: tuple[int, int], q_axis: int) -> Array:
        """Return the mask of the tile whose first query and key are `starts`."""
        q_index = self.registers.index(shape, q_axis) + starts[0]
        k_index = self.registers.index(shape, 1 - q_axis) + starts[1]

        def read(ref: Any, start: Any, axis: int) -> Array:
            row = 0 if ref.shape[0] == 1 else self.sequence
            part = ref.at[row, pl.ds(start, shape[axis])]
            return along(self.registers.load(part, axis), shape, axis)

        q_ref, k_ref, q_segment_ref, k_segment_ref = self.refs
        q_position = q_index if q_ref is None else read(q_ref, starts[0], q_axis)
        k_position = k_index if k_ref is None else read(k_ref, starts[1], 1 - q_axis)
        q_segment = None if q_segment_ref is None else read(q_segment_ref, starts[0], q_axis)
        k_segment = None if k_segment_ref is None else read(k_segment_ref, starts[1], 1 - q_axis)
        is_visible = sees(self.rules, q_position, k_position, q_segment, k_segment)
        return is_visible if self.num_keys is None else is_visible & (k_index < self.num_keys)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Walk:
    """List of blocks that a program visits, `heads` times over."""

    order: Any
    counts: Any
    sequence: Any
    block: Any
    heads: int

    @classmethod
    def of(cls, order: Any, counts: Any, sequence: Any, block: Any, heads: int = 1) -> "Walk":
        """Return the walk from references to lists that may be shared by all sequences."""
        row = 0 if order.shape[0] == 1 else sequence
        return cls(order=order, counts=counts, sequence=row, block=block, heads=heads)

    def fold(self, step: Callable[..., Any], carry: Any) -> Any:
        """Fold step(at, carry, is_masked) over WHOLE, then over MASKED blocks."""
        num_unmasked = self.counts[self.sequence, self.block, 0] * self.heads
        for first, last, is_masked in (
            (jnp.int32(0), num_unmasked, False),
            (num_unmasked, self.steps(), True),
        ):
            carry = jax.lax.fori_loop(
                first, last, functools.partial(step, is_masked=is_masked), carry
            )
        return carry

    def steps(self) -> Array:
        """Return the number of steps."""
        return self.counts[self.sequence, self.block, 1] * self.heads

    def at(self, step: Array) -> tuple[Array, Array]:
        """Return the block and the head of a step: all heads for one block, then for the next."""
        if self.heads == 1:
            return self.order[self.sequence, self.block, step], jnp.int32(0)
        heads = jnp.int32(self.heads)
        index = jax.lax.div(step, heads)
        return self.order[self.sequence, self.block, index], jax.lax.rem(step, heads)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AttentionCall:
    """Static part of a call that all its kernels read."""

    rules: Rules
    registers: Registers
    given: tuple[bool, ...]
    """Whether each field of the tokens is given."""
    num_keys: int | None
    """Number of keys without padding; None where there is no padding."""
    group: int
    """Query heads of a key head."""

    @classmethod
    def of(cls, operands: AttentionOperands, interpret: Any) -> "AttentionCall":
        """Return the static part of a call."""
        q, k, _, tokens, rules = operands
        return cls(
            rules=rules,
            registers=Registers(is_interpreted=interpret is not None),
            given=tuple(x is not None for x in tokens),
            num_keys=k.shape[1] if k.shape[1] % KEPT else None,
            group=q.shape[2] // k.shape[2],
        )

    def mask(self, refs: tuple[Any, ...], sequence: Any) -> tuple[Mask, tuple[Any, ...]]:
        """Return the mask from the references to the given tokens, which come first, and the rest.

        Args:
            refs: References, to the tokens and others.
            sequence: Index of the program's sequence.
        """
        remaining = list(refs)
        tokens = Tokens(*(remaining.pop(0) if is_given else None for is_given in self.given))
        mask = Mask(
            rules=self.rules,
            registers=self.registers,
            refs=tokens,
            sequence=sequence,
            num_keys=self.num_keys,
        )
        return mask, tuple(remaining)


def load_ring(walk: Walk, stages: int, parts: tuple[tuple[Any, Callable[..., None]], ...]) -> None:
    """Run the loading warpgroup, which fills a slot once both computing ones have freed it.

    Args:
        walk: Blocks of the program.
        stages: Number of slots.
        parts: Pairs of the barriers at which slots become free, and copy(block, head, slot).
    """
    plgpu.set_max_registers(REGISTERS_LOADING, action="decrease")

    steps = walk.steps()

    def await_free(step: Array, free: Any) -> None:
        @pl.when(step >= stages)
        def _wait() -> None:
            plgpu.barrier_wait(free.at[slot_of(step, stages)])

    @pl.loop(0, steps)
    def _step(step: Array) -> None:
        block, head = walk.at(step)
        for free, copy in parts:
            await_free(step, free)
            copy(block, head, slot_of(step, stages))

    # The waiting side must observe every phase of a barrier, the last one included.
    @pl.loop(steps, steps + stages)
    def _drain(step: Array) -> None:
        for free, _ in parts:
            await_free(step, free)
