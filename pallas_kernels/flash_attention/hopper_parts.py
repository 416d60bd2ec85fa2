# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""What the Hopper kernels of flash_attention share: registers, the mask, the walk over blocks, the
warpgroup that loads, and the call.

See pallas_gpu_hopper.py for how they work together.

To add a rule of the mask: nothing here, see mask.py.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.array_types import Array
from pallas_kernels.flash_attention.hopper_tiles import (
    COMPUTING,
    KEPT,
    REGISTERS_LOADING,
    filled_width,
)
from pallas_kernels.flash_attention.mask import Rules, Tokens, sees
from pallas_kernels.jax_versions import load_arranged, match_varying, transposed_ref
from pallas_kernels.jax_versions import mosaic_gpu as plgpu

LOG2_E = math.log2(math.e)


def fill(x: Array) -> Array:
    """[B L N H] with L in whole blocks and H in whole tiles."""
    sizes = (0, -x.shape[1] % KEPT, 0, filled_width(x.shape[3]) - x.shape[3])
    return jnp.pad(x, [(0, size) for size in sizes]) if any(sizes) else x


def fill_last(x: Array) -> Array:
    """[... L] with L in whole blocks."""
    more = -x.shape[-1] % KEPT
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, more)]) if more else x


def fill_tokens(tokens: Tokens) -> list[Array]:
    """Those that are there, as [1 or B, L]."""
    rows = (x.astype(jnp.int32) for x in tokens if x is not None)
    return [fill_last(x if x.ndim == 2 else x[None]) for x in rows]


def shared(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory in the arrangement that TMA writes and WGMMA reads."""
    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Registers:
    """Arrays in the arrangement of WGMMA's results, and products that add to them.

    The interpreter has no arrangements, and multiplies only what lies in shared memory: there the
    same is said in plain operations.
    """

    is_interpreted: bool

    def arranged(self, x: Array) -> Array:
        """A matrix, or one number per row, as WGMMA would give it."""
        if self.is_interpreted:
            return x
        whole = plgpu.Layout.WGMMA
        return plgpu.layout_cast(x, whole if x.ndim == 2 else whole.reduce(1))

    def constant(self, shape: tuple[int, ...], value: float) -> Array:
        """A matrix, or one number per row."""
        return self.arranged(jnp.full(shape, value, jnp.float32))

    def index(self, shape: tuple[int, int], axis: int) -> Array:
        """The row or column of every element."""
        return self.arranged(jax.lax.broadcasted_iota(jnp.int32, shape, axis))

    def load(self, ref: Any, axis: int) -> Array:
        """A vector that goes along rows (axis 0) or columns (1), from either memory."""
        if self.is_interpreted:
            return ref[...]
        return load_arranged(ref, plgpu.Layout.WGMMA.reduce(1 - axis))

    def products(
        self, shape: tuple[int, int], *pairs: tuple[Any, Any], started: Any = None
    ) -> tuple[Array, ...]:
        """left @ right^T of every pair of matrices in shared memory; `started()` runs meanwhile."""

        def multiply(*sums: Any) -> tuple[Array, ...]:
            for total, (left, right) in zip(sums, pairs, strict=True):
                plgpu.wgmma(total, left, transposed_ref(right))
            if started is not None:
                started()
            return tuple(total[...] for total in sums)

        if self.is_interpreted:
            results = tuple(_dot(left[...], right[...], 1) for left, right in pairs)
            if started is not None:
                started()
            return results
        return pl.run_scoped(
            multiply, *(plgpu.WGMMAAccumulatorRef(shape, jnp.float32) for _ in pairs)
        )

    def add(
        self, totals: tuple[Array, ...], *pairs: tuple[Array, Any], started: Any = None
    ) -> tuple[Array, ...]:
        """total + left @ right of every pair, with `left` in registers, `right` in shared memory;
        `started()` runs meanwhile."""

        def multiply(sums: tuple[Any, ...]) -> None:
            for total, (left, right) in zip(sums, pairs, strict=True):
                plgpu.wgmma(total, left, right)
            if started is not None:
                started()

        if self.is_interpreted:
            if started is not None:
                started()
            products = (_dot(left, right[...], 0) for left, right in pairs)
            return tuple(total + x for total, x in zip(totals, products, strict=True))
        return tuple(pl.run_state(multiply)(tuple(plgpu.ACC.init(x) for x in totals)))

    def free(self, barrier: Any, *, has_loaded: bool = False) -> None:
        """Gives a slot back to TMA. WGMMA reads as TMA writes, in the asynchronous order; what was
        loaded into registers (`has_loaded`), as all is by the interpreter, has to be fenced."""
        if has_loaded or self.is_interpreted:
            plgpu.commit_smem()
        plgpu.barrier_arrive(barrier)


def _dot(left: Array, right: Array, axis: int) -> Array:
    dimensions = (((1,), (axis,)), ((), ()))
    return jax.lax.dot_general(left, right, dimensions, preferred_element_type=jnp.float32)


def along(x: Array, shape: tuple[int, int], axis: int) -> Array:
    """A vector as a matrix: element i in all of row i (axis 0) or of column i (1)."""
    return jax.lax.broadcast_in_dim(x, shape, [axis])


def slot_of(at: Array, stages: int) -> Array:
    """Where the block of a step lies."""
    return jax.lax.rem(at, jnp.int32(stages))


def logits_of(products: Array, rules: Rules) -> Array:
    """Scaled and capped, in units of log 2."""
    if rules.softcap is None:
        return products * (rules.scale * LOG2_E)
    return jnp.tanh(products * (rules.scale / rules.softcap)) * (rules.softcap * LOG2_E)


def sloped(d_logits: Array, logits: Array, rules: Rules) -> Array:
    """Through the cap."""
    if rules.softcap is None:
        return d_logits
    capped = logits * (1.0 / (rules.softcap * LOG2_E))
    return d_logits * (1.0 - capped * capped)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Mask:
    """What a kernel needs to know of tokens: references into global memory, [1 or B, L]."""

    rules: Rules
    registers: Registers
    refs: Tokens
    sequence: Any
    """Index of the program's sequence."""
    num_keys: int | None
    """Keys that are there, where some are filling."""

    def of(self, starts: tuple[Any, Any], shape: tuple[int, int], q_axis: int) -> Array:
        """Who sees whom in the tile whose first query and key are `starts`."""
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
    """The list of blocks that a program goes through, `heads` times over."""

    order: Any
    counts: Any
    sequence: Any
    block: Any
    heads: int

    @classmethod
    def of(cls, order: Any, counts: Any, sequence: Any, block: Any, heads: int = 1) -> "Walk":
        """From references to lists that may be one for all sequences."""
        row = 0 if order.shape[0] == 1 else sequence
        return cls(order=order, counts=counts, sequence=row, block=block, heads=heads)

    def phases(self) -> tuple[tuple[Array, Array, bool], ...]:
        """(first step, last step + 1, is masked) of the WHOLE blocks, then the MASKED ones."""
        whole = self.counts[self.sequence, self.block, 0] * self.heads
        return (jnp.int32(0), whole, False), (whole, self.steps(), True)

    def steps(self) -> Array:
        """How many in all."""
        return self.counts[self.sequence, self.block, 1] * self.heads

    def at(self, step: Array) -> tuple[Array, Array]:
        """The block and the head of a step: all heads for one block, then for the next."""
        if self.heads == 1:
            return self.order[self.sequence, self.block, step], jnp.int32(0)
        heads = jnp.int32(self.heads)
        index = jax.lax.div(step, heads)
        return self.order[self.sequence, self.block, index], jax.lax.rem(step, heads)


def split_refs(refs: tuple[Any, ...], given: tuple[bool, ...]) -> tuple[Tokens, tuple[Any, ...]]:
    """The references to the tokens that are there, and the rest."""
    left = list(refs)
    return Tokens(*(left.pop(0) if is_given else None for is_given in given)), tuple(left)


def load_ring(walk: Walk, stages: int, parts: tuple[tuple[Any, Callable[..., None]], ...]) -> None:
    """The loading warpgroup: fills slot after slot, once both computing ones have freed it.

    Args:
        walk: the program's blocks.
        stages: slots.
        parts: pairs of the barriers at which slots become free, and copy(block, head, slot).
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

    # Every phase of a barrier is seen by the one that waits there, also the last.
    @pl.loop(steps, steps + stages)
    def _drain(step: Array) -> None:
        for free, _ in parts:
            await_free(step, free)


def call(
    kernel: Callable[..., None],
    arrays: tuple[Array, ...],
    out_type: tuple[Any, ...],
    scratch: tuple[Any, ...],
    grid: tuple[int, int, int],
    grid_names: tuple[str, str, str],
    interpret: Any,
) -> tuple[Array, ...]:
    """Runs a kernel whose scratch may hold None."""
    found = [i for i, kind in enumerate(scratch) if kind is not None]

    def body(*refs):
        named, last = refs[: len(refs) - len(found)], refs[len(refs) - len(found) :]
        filled = dict(zip(found, last, strict=True))
        kernel(*named, *(filled.get(i) for i in range(len(scratch))))

    results = plgpu.kernel(
        body,
        out_type=list(out_type),
        scratch_types=[scratch[i] for i in found],
        grid=grid,
        grid_names=grid_names,
        num_threads=COMPUTING + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(*arrays)
    return tuple(match_varying(x, *arrays) for x in results)
