# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Parts of the Hopper kernels of several operations: memory, registers, ring, stores, call.

A program has warpgroups that compute and one that loads. The loading one fills a ring of slots in
shared memory by TMA; a slot has a barrier `full`, at which its copies arrive, and a barrier `free`,
at which every computing warpgroup arrives when it has read. WGMMA multiplies out of shared memory
and adds in registers. See flash_attention/gpu/hopper.py and grouped_matmul/gpu/hopper.py.

All of it also runs interpreted on the CPU (`InterpretGPUParams`).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.array_types import Array
from pallas_kernels.backend import platform
from pallas_kernels.jax_versions import load_arranged, load_tile, match_varying, transposed_ref
from pallas_kernels.jax_versions import mosaic_gpu as plgpu

COMPUTING = 2
"""Number of computing warpgroups."""
ROWS = 64
"""Rows of a computing warpgroup, which one WGMMA instruction writes."""

# Bytes of shared memory of a program: 227 KiB, less 1 KiB for barriers and alignment.
SHARED = 226 * 1024
# The 64 Ki registers of a multiprocessor: 2 x 128 x 232 + 128 x 40.
REGISTERS_COMPUTING = 232
REGISTERS_LOADING = 40
MULTIPROCESSORS = 132
"""Multiprocessors of an H100 or H200 in a server."""


def shared_memory(shape: tuple[int, ...], dtype: Any) -> Any:
    """Return shared memory in the arrangement that TMA writes and WGMMA reads."""
    line = 128 // jnp.dtype(dtype).itemsize
    transforms = (plgpu.TilingTransform((8, line)), plgpu.SwizzleTransform(128))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Registers:
    """Arrays in the arrangement of WGMMA's results, and products that add to them.

    The interpreter has no arrangements, and multiplies only from shared memory: plain operations
    compute the same there.
    """

    is_interpreted: bool

    def arrange(self, x: Array) -> Array:
        """Cast a matrix, or one number per row, to the arrangement of WGMMA."""
        if self.is_interpreted:
            return x
        layout = plgpu.Layout.WGMMA
        return plgpu.layout_cast(x, layout if x.ndim == 2 else layout.reduce(1))

    def constant(self, shape: tuple[int, ...], value: float) -> Array:
        """Return a constant matrix, or one constant per row."""
        return self.arrange(jnp.full(shape, value, jnp.float32))

    def index(self, shape: tuple[int, int], axis: int) -> Array:
        """Return the row or column index of every element."""
        return self.arrange(jax.lax.broadcasted_iota(jnp.int32, shape, axis))

    def load(self, ref: Any, axis: int) -> Array:
        """Load a vector along rows (axis 0) or columns (1), from global or shared memory."""
        if self.is_interpreted:
            return ref[...]
        return load_arranged(ref, plgpu.Layout.WGMMA.reduce(1 - axis))

    def products(
        self, shape: tuple[int, int], *pairs: tuple[Any, Any], started: Any = None
    ) -> tuple[Array, ...]:
        """Return left @ right^T of every pair of matrices in shared memory.

        `started()` runs while the products do.
        """

        def multiply(*sums: Any) -> tuple[Array, ...]:
            for total, (lhs, rhs) in zip(sums, pairs, strict=True):
                plgpu.wgmma(total, lhs, transposed_ref(rhs))
            if started is not None:
                started()
            return tuple(total[...] for total in sums)

        if self.is_interpreted:
            results = tuple(_dot(lhs[...], rhs[...], 1) for lhs, rhs in pairs)
            if started is not None:
                started()
            return results
        dtypes = (sum_dtype(lhs.dtype) for lhs, _ in pairs)
        return pl.run_scoped(
            multiply, *(plgpu.WGMMAAccumulatorRef(shape, dtype) for dtype in dtypes)
        )

    def add(
        self, totals: tuple[Array, ...], *pairs: tuple[Array, Any], started: Any = None
    ) -> tuple[Array, ...]:
        """Return total + left @ right of every pair, `left` in registers, `right` in shared memory.

        `started()` runs while the products do.
        """

        def multiply(sums: tuple[Any, ...]) -> None:
            for total, (lhs, rhs) in zip(sums, pairs, strict=True):
                plgpu.wgmma(total, lhs, rhs)
            if started is not None:
                started()

        if self.is_interpreted:
            if started is not None:
                started()
            products = (_dot(lhs, rhs[...], 0) for lhs, rhs in pairs)
            return tuple(total + x for total, x in zip(totals, products, strict=True))
        return tuple(pl.run_state(multiply)(tuple(plgpu.ACC.init(x) for x in totals)))

    def widen(self, ref: Any, dtype: Any) -> Array:
        """Return a matrix of 8 or 4 bits in shared memory as exact floating values."""
        if self.is_interpreted:
            return ref[...].astype(dtype)
        # A thread then holds 4 consecutive bytes: it loads them at once, and writes 16 or 8.
        is_int4 = ref.dtype == jnp.int4
        x = load_tile(
            ref, plgpu.Layout.WGMMA_UPCAST_4X if is_int4 else plgpu.Layout.WGMMA_UPCAST_2X
        )
        if jnp.issubdtype(ref.dtype, jnp.floating):
            x = x.astype(jnp.float16)
            if dtype != jnp.float16:
                x = x.astype(jnp.float32)
        return x.astype(dtype)

    def add_while(self, total: Array, lhs: Any, rhs: Any, meanwhile: Callable[[], None]) -> Array:
        """Return total + left @ right from shared memory; `meanwhile()` runs beside the product."""

        def multiply(sums: Any) -> None:
            plgpu.wgmma(sums, lhs, rhs)
            meanwhile()

        if self.is_interpreted:
            meanwhile()
            return total + _dot(lhs[...], rhs[...], 0)
        return pl.run_state(multiply)(plgpu.ACC.init(total))

    def sum_of(
        self,
        shape: tuple[int, int],
        ring: "Ring",
        first: Array,
        last: Array,
        operands: tuple[tuple[Any, Any], tuple[Any, Any]],
        is_turned: tuple[bool, bool],
        before: Callable[[Array, Array], None] | None = None,
    ) -> Array:
        """Return the sum of left @ right over the steps of a ring from `first` to before `last`.

        A slot is freed once the product of the next one is under way.

        Args:
            shape: Shape of the sum.
            ring: Ring whose slots are read and freed.
            first: First step.
            last: Last step + 1.
            operands: Slots of the left and the right operand in shared memory, each with the part
                of a
                slot to read, None for all of it.
            is_turned: Whether each operand is transposed.
            before: Called with (step, slot) when a slot is full.
        """

        def fill(step: Array) -> tuple[Array, Any, Any]:
            slot = ring.await_full(step)
            if before is not None:
                before(step, slot)
            lhs, rhs = (
                slots.at[slot] if part is None else slots.at[slot, part] for slots, part in operands
            )
            return slot, lhs, rhs

        dtype = sum_dtype(operands[0][0].dtype)
        if self.is_interpreted:

            def step(at: Array, total: Array) -> Array:
                slot, lhs, rhs = fill(at)
                product = _dot(lhs[...], rhs[...], int(is_turned[1]), int(not is_turned[0]))
                self.free(ring.free.at[slot])
                return total + product

            return jax.lax.fori_loop(first, last, step, jnp.zeros(shape, dtype))

        def multiply(total: Any) -> Array:
            @pl.loop(first, last)
            def _step(at: Array) -> None:
                _, lhs, rhs = fill(at)
                lhs = transposed_ref(lhs) if is_turned[0] else lhs
                plgpu.wgmma(total, lhs, transposed_ref(rhs) if is_turned[1] else rhs)
                plgpu.wgmma_wait(1)

                @pl.when(at > first)
                def _free() -> None:
                    self.free(ring.free.at[slot_of(at - 1, ring.stages)])

            result = total[...]

            @pl.when(last > first)
            def _free_last() -> None:
                self.free(ring.free.at[slot_of(last - 1, ring.stages)])

            return result

        return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(shape, dtype))

    def free(self, barrier: Any, *, has_loaded: bool = False) -> None:
        """Give a slot back to TMA.

        WGMMA reads in the asynchronous order in which TMA writes. Loads into registers
        (`has_loaded`),
        and all loads of the interpreter, need a fence.
        """
        if has_loaded or self.is_interpreted:
            plgpu.commit_smem()
        plgpu.barrier_arrive(barrier)


def _dot(lhs: Array, rhs: Array, axis: int, left_axis: int = 1) -> Array:
    dimensions = (((left_axis,), (axis,)), ((), ()))
    dtype = sum_dtype(lhs.dtype)
    return jax.lax.dot_general(lhs, rhs, dimensions, preferred_element_type=dtype)


def sum_dtype(dtype: Any) -> Any:
    """Return the dtype in which WGMMA sums products of these values."""
    return jnp.int32 if jnp.issubdtype(dtype, jnp.integer) else jnp.float32


def along(x: Array, shape: tuple[int, int], axis: int) -> Array:
    """Broadcast a vector to a matrix: element i fills row i (axis 0) or column i (1)."""
    return jax.lax.broadcast_in_dim(x, shape, [axis])


def slot_of(at: Array, stages: int) -> Array:
    """Return the slot of a step."""
    return jax.lax.rem(at, jnp.int32(stages))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Ring:
    """Slots that one warpgroup fills and others empty; steps count over the whole program."""

    stages: int
    """Number of slots."""
    full: Any
    """Barriers, one per slot, at which copies arrive."""
    free: Any
    """Barriers, one per slot, at which all readers arrive."""

    def acquire(self, at: Array) -> Array:
        """Return the slot of a step once it is free, for the loading warpgroup."""
        slot = slot_of(at, self.stages)

        @pl.when(at >= self.stages)
        def _wait() -> None:
            plgpu.barrier_wait(self.free.at[slot])

        return slot

    def drain(self, steps: Array) -> None:
        """Wait for the slots still in use; every phase of a barrier must be observed."""

        @pl.loop(steps, steps + self.stages)
        def _drain(at: Array) -> None:
            self.acquire(at)

    def await_full(self, at: Array) -> Array:
        """Return the slot of a step once it is filled, for a computing warpgroup."""
        slot = slot_of(at, self.stages)
        plgpu.barrier_wait(self.full.at[slot])
        return slot


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Stores:
    """Stores of 64 rows of a result, or some of them, through TMA."""

    staged: Any
    """[2 slots, 64, columns of 128 bytes] of this warpgroup, arranged for TMA."""
    cut: Any
    """[64, as many columns], not arranged, so that copies may begin at any row."""

    def put(
        self,
        x: Array,
        out: Any,
        place: tuple[Array, Array],
        bounds: tuple[Array, Array] | None = None,
    ) -> None:
        """Store x, or rows of it.

        Args:
            x: [64, columns] in registers.
            out: [rows, columns] in global memory.
            place: Row and column of `out` where x begins.
            bounds: First row of x to store, and last + 1, which may be out of range.
        """
        row, column = place
        wide = self.cut.shape[-1]
        parts = [(i, slice(i, i + wide)) for i in range(0, x.shape[1], wide)]

        def whole() -> None:
            for i, part in parts:
                slot = self.staged.at[i // wide % 2]
                # Slots alternate, except between the last of an odd number and the next first.
                is_after_itself = i == 0 and len(parts) % 2 == 1
                plgpu.wait_smem_to_gmem(int(not is_after_itself), wait_read_only=True)
                slot[...] = x[:, part].astype(out.dtype)
                plgpu.commit_smem()
                rows = pl.ds(pl.multiple_of(row, 8), ROWS)
                plgpu.copy_smem_to_gmem(slot, out.at[rows, pl.ds(column + i, wide)])

        if bounds is None:
            return whole()
        low, high = (jnp.clip(x, 0, ROWS) for x in bounds)
        is_whole = high - low == ROWS
        pl.when(is_whole)(whole)

        @pl.when(jnp.logical_not(is_whole) & (high > low))
        def _some() -> None:
            for i, part in parts:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                self.cut[...] = x[:, part].astype(out.dtype)
                plgpu.commit_smem()
                start = low
                for size in (32, 16, 8, 4, 2, 1):
                    has_copy = ((high - low) & size) != 0

                    @pl.when(has_copy)
                    def _copy(start=start, size=size, i=i) -> None:
                        rows = pl.ds(row + start, size)
                        source = self.cut.at[pl.ds(start, size)]
                        plgpu.copy_smem_to_gmem(source, out.at[rows, pl.ds(column + i, wide)])

                    start = start + jnp.where(has_copy, size, 0)


def fill_zeros(x: Array, *multiples: int) -> Array:
    """Pad with zeros, so that every size is a multiple."""
    more = [-size % multiple for size, multiple in zip(x.shape, multiples, strict=True)]
    return jnp.pad(x, [(0, size) for size in more]) if any(more) else x


def walk_tiles(total: Array | int, number: int, tile: Callable[[Array, Array], Array]) -> Array:
    """Visit every `number`-th of `total` tiles, starting with the program's own index.

    Args:
        total: Number of tiles of all programs.
        number: Number of programs, whose index is the axis "program".
        tile: Maps (index, steps so far) to the steps including its own.

    Returns:
        The steps of all of them.
    """
    program = jax.lax.axis_index("program")
    turns = jax.lax.div(total - program + (number - 1), jnp.int32(number))
    return jax.lax.fori_loop(
        0, turns, lambda turn, steps: tile(program + turn * number, steps), jnp.int32(0)
    )


def run_tiles(
    warpgroup: Array,
    total: Array | int,
    number: int,
    ring: Ring,
    compute: Callable[[Array, Array], Array],
    load: Callable[[Array, Array], Array],
) -> None:
    """Visit the tiles of a program with every warpgroup, which compute or load.

    Args:
        warpgroup: Index of the warpgroup.
        total: Number of tiles of all programs.
        number: Number of programs.
        ring: Slots that are filled and emptied.
        compute: Maps (index, steps so far) to the steps including its own, where a
            warpgroup computes.
        load: The same, where a warpgroup loads.
    """

    @pl.when(warpgroup < COMPUTING)
    def _compute() -> None:
        plgpu.set_max_registers(REGISTERS_COMPUTING, action="increase")
        walk_tiles(total, number, compute)
        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == COMPUTING)
    def _load() -> None:
        plgpu.set_max_registers(REGISTERS_LOADING, action="decrease")
        ring.drain(walk_tiles(total, number, load))


def programs(interpret: Any) -> int:
    """Return the number of programs: one per multiprocessor, two when interpreted."""
    if interpret is not None:
        return 2
    described = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if described is not None or platform() != "gpu":
        return getattr(described, "num_cores", None) or MULTIPROCESSORS
    return getattr(jax.devices()[0], "core_count", MULTIPROCESSORS)


def call(
    kernel: Callable[..., None],
    arrays: tuple[Array, ...],
    out_type: tuple[Any, ...],
    scratch: tuple[Any, ...],
    grid: tuple[int, ...],
    grid_names: tuple[str, ...],
    interpret: Any,
) -> tuple[Array, ...]:
    """Run a kernel whose scratch may contain None."""
    indices = [i for i, kind in enumerate(scratch) if kind is not None]

    def body(*refs):
        arguments = refs[: len(refs) - len(indices)]
        last = refs[len(refs) - len(indices) :]
        filled = dict(zip(indices, last, strict=True))
        kernel(*arguments, *(filled.get(i) for i in range(len(scratch))))

    results = plgpu.kernel(
        body,
        out_type=list(out_type),
        scratch_types=[scratch[i] for i in indices],
        grid=grid,
        grid_names=grid_names,
        num_threads=COMPUTING + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(*arrays)
    return tuple(match_varying(x, *arrays) for x in results)
