# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Provides a Pallas TPU kernel that sends parcels to other ranks while it computes.

A `Sender` replaces `pl.pallas_call` and makes any kernel send as well:

    first grid step   all ranks of the axis meet; then every copy is started, from HBM to the HBM of
                      its target rank, each with its own semaphores
    every grid step   the kernel's arithmetic, while the copies are under way
    last grid step    waits for the sends and the arrivals

**Safety of writes into another rank's memory.** A remote copy has no handshake: it writes when the
sender starts it. The buffer that it writes is an output of the receiver's kernel, memory that XLA
may use for something else until that kernel starts. No rank therefore sends before all ranks have
signalled that they are inside (the barrier semaphore, which outlives kernels): the signal of entry
is the receiver's permission, like a capacity semaphore in a ring inside one kernel (ring_keys.py).
XLA does the double buffering: what a step reads and what arrives in it are separate live buffers.

**Separation of consecutive barriers.** The barrier is one counter for all kernels with the same id.
A rank in the next step could count for a rank that has not reached this one, and a slow rank would
send into memory that is not ready. A rank that passes the barrier therefore signals all others
through a semaphore of this kernel, and no rank leaves before all signals have arrived: signals of
two kernels never mix in the counter. Kernels may follow one another in any order and differ in
their pairs; both passes and all layers share the id. Both rounds are N - 1 signals of every rank,
and the second is waited for after the arithmetic. Ids of two mesh axes differ (`collective_id`).

Pairs are static and arbitrary: a rank without a target does not send; a rank without a source does
not wait and gets zeros.

It takes one mesh axis by name, of which all ranks are in the kernel. A sending kernel runs on one
core, whose grid has a first and a last step: chips that split a grid over two cores are not
supported.
"""

import dataclasses
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.array_types import Array
from pallas_kernels.jax_versions import shape_varying_like
from pallas_kernels.ring.parcel import Parcel

FIRST_COLLECTIVE_ID = 64
COLLECTIVE_IDS = 2**14


class Sender:
    """Shares parcels out among the kernels of a step, by their bytes."""

    def __init__(self, parcels: Sequence[Parcel], axis_name: str, num_kernels: int = 1):
        self._axis_name = axis_name
        self._parcels = parcels
        self._arrived: list[Array | None] = [None] * len(parcels)
        self._shares: list[list[int]] = [[] for _ in range(num_kernels)]
        loads = [0] * num_kernels
        for number in sorted(range(len(parcels)), key=lambda at: -parcels[at].array.nbytes):
            lightest = loads.index(min(loads))
            loads[lightest] += parcels[number].array.nbytes
            self._shares[lightest].append(number)

    def pallas_call(
        self, body: Callable[..., None], *, grid_spec: Any, out_shape: Any, **options: Any
    ) -> Callable[..., Any]:
        """Return a replacement for `pl.pallas_call` that sends the next share of the parcels.

        Args:
            body: Kernel.
            grid_spec: `PrefetchScalarGridSpec` with lists of specs.
            out_shape: List of shapes.
            options: Further options of `pl.pallas_call`.
        """
        share = self._shares.pop(0)

        def call(*operands: Array) -> Any:
            outputs, arrived = _run_and_send(
                body,
                [self._parcels[at] for at in share],
                self._axis_name,
                operands,
                grid_spec=grid_spec,
                out_shape=out_shape,
                **options,
            )
            for at, x in zip(share, arrived, strict=True):
                self._arrived[at] = x
            return outputs

        return call

    @property
    def arrivals(self) -> tuple[Array, ...]:
        """Arrays that arrived, once all kernels were called."""
        copies = [x for x in self._arrived if x is not None]
        assert len(copies) == len(self._parcels) and not self._shares
        return tuple(copies)


def send(parcels: Sequence[Parcel], axis_name: str) -> tuple[Array, ...]:
    """Send parcels in a kernel that computes nothing, and return the arrays that arrive.

    Args:
        parcels: Arrays to send.
        axis_name: Mesh axis of the ring.
    """
    if not parcels:
        return ()
    sender = Sender(parcels, axis_name)
    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=0, grid=(1,), in_specs=[], out_specs=[], scratch_shapes=[]
    )
    sender.pallas_call(lambda *refs: None, grid_spec=grid_spec, out_shape=[], name="parcels")()
    return sender.arrivals


def _run_and_send(
    body: Callable[..., None],
    parcels: Sequence[Parcel],
    axis_name: str,
    operands: Sequence[Array],
    *,
    grid_spec: Any,
    out_shape: Any,
    name: str,
    compiler_params: Any = None,
    **options: Any,
) -> tuple[Sequence[Array], list[Array]]:
    """Return the kernel's results, and the arrays that arrive."""
    sent = [parcel for parcel in parcels if parcel.pairs]
    if not sent:
        if compiler_params is not None:
            options["compiler_params"] = compiler_params
        call = pl.pallas_call(body, grid_spec=grid_spec, out_shape=out_shape, name=name, **options)
        return call(*operands), [jnp.zeros_like(x) for x, _ in parcels]
    ranks = jax.lax.axis_size(axis_name)
    # Parcels that some rank does not receive start as zeros.
    partial = [at for at, (_, pairs) in enumerate(sent) if len(pairs) < ranks]
    axes, place = mesh_place()
    routes = jnp.concatenate([_routes(sent, ranks)[jax.lax.axis_index(axis_name)], place])
    num_scalars = grid_spec.num_scalar_prefetch
    num_in = len(operands)
    num_sent = len(sent)

    def kernel(*refs: Any) -> None:
        ins = refs[:num_in]
        routes = refs[num_in]
        refs = refs[num_in + 1 :]
        sources = refs[:num_sent]
        refs = refs[num_sent + len(partial) :]
        outs = refs[: len(out_shape)]
        refs = refs[len(out_shape) :]
        targets, (*scratch, sending, receiving, passed) = refs[:num_sent], refs[num_sent:]
        coordinates: Any = {axis: routes[2 * num_sent + at] for at, axis in enumerate(axes)}
        copies = [
            pltpu.make_async_remote_copy(
                source,
                target,
                sending.at[at],
                receiving.at[at],
                coordinates | {axis_name: jnp.maximum(routes[2 * at], 0)},
            )
            for at, (source, target) in enumerate(zip(sources, targets, strict=True))
        ]

        @pl.when(_is_step(grid_spec.grid, 0))
        def _():
            meet(coordinates, axis_name, passed)
            for at, copy in enumerate(copies):
                pl.when(routes[2 * at] >= 0)(copy.start)

        body(*ins, *outs, *scratch)

        @pl.when(_is_step(grid_spec.grid, -1))
        def _():
            for at, copy in enumerate(copies):
                pl.when(routes[2 * at] >= 0)(copy.wait_send)
                pl.when(routes[2 * at + 1] >= 0)(copy.wait_recv)
            part(axis_name, passed)

    in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    arrays = [x for x, _ in sent]
    zeros = [jnp.zeros_like(arrays[at]) for at in partial]
    params = pltpu.CompilerParams() if compiler_params is None else compiler_params
    cost = options.pop("cost_estimate", None)
    if cost is None:
        cost = pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=0)
    # Bytes of one rank that sends everything.
    cost = dataclasses.replace(cost, remote_bytes_transferred=sum(x.nbytes for x in arrays))
    outputs = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=num_scalars,
            grid=grid_spec.grid,
            in_specs=[
                *grid_spec.in_specs,
                pl.BlockSpec(memory_space=pltpu.SMEM),
                *[in_hbm] * (num_sent + len(zeros)),
            ],
            out_specs=[*grid_spec.out_specs, *[in_hbm] * num_sent],
            scratch_shapes=[
                *grid_spec.scratch_shapes,
                pltpu.SemaphoreType.DMA((num_sent,)),
                pltpu.SemaphoreType.DMA((num_sent,)),
                pltpu.SemaphoreType.REGULAR,
            ],
        ),
        out_shape=[*out_shape, *(shape_varying_like(x.shape, x.dtype, x) for x in arrays)],
        input_output_aliases={
            num_in + 1 + num_sent + number: len(out_shape) + at for number, at in enumerate(partial)
        },
        compiler_params=dataclasses.replace(
            params,
            dimension_semantics=("arbitrary",) * len(grid_spec.grid),
            collective_id=collective_id(axis_name),
            has_side_effects=True,
        ),
        cost_estimate=cost,
        name=f"{name}_and_send",
        **options,
    )(*operands, routes, *arrays, *zeros)
    results = outputs[: len(out_shape)]
    received = iter(outputs[len(out_shape) :])
    return results, [next(received) if pairs else jnp.zeros_like(x) for x, pairs in parcels]


def collective_id(axis_name: str) -> int:
    """Return the id of the barrier at which the ranks of an axis meet.

    It is the same in every process, most likely different for another axis, and above the small
    numbers of other kernels.

    Args:
        axis_name: Mesh axis of the ring.
    """
    return FIRST_COLLECTIVE_ID + zlib.crc32(axis_name.encode()) % COLLECTIVE_IDS


def mesh_place() -> tuple[tuple[str, ...], Array]:
    """Return the manual mesh axes, and this device's index along each.

    A kernel is given the indices: inside it they would vary by type.
    """
    axes = tuple(sorted(jax.sharding.get_abstract_mesh().manual_axes))
    return axes, jnp.stack([jax.lax.axis_index(axis) for axis in axes])


def meet(coordinates: Any, axis_name: str, passed: Any) -> None:
    """Wait until every rank of the axis is in this kernel; call it at the start.

    Args:
        coordinates: Dict with the index of this device along every mesh axis.
        axis_name: Mesh axis of the ring.
        passed: Regular semaphore of this kernel, for `part`.
    """
    ranks = jax.lax.axis_size(axis_name)
    barrier = pltpu.get_barrier_semaphore()
    neighbours = [
        coordinates | {axis_name: jax.lax.rem(coordinates[axis_name] + distance, ranks)}
        for distance in range(1, ranks)
    ]
    for neighbour in neighbours:
        pl.semaphore_signal(barrier, 1, device_id=neighbour)
    pl.semaphore_wait(barrier, ranks - 1)
    for neighbour in neighbours:
        pl.semaphore_signal(passed, 1, device_id=neighbour)


def part(axis_name: str, passed: Any) -> None:
    """Wait until every rank has left `meet`; call it at the end of the kernel.

    Args:
        axis_name: Mesh axis of the ring.
        passed: Semaphore given to `meet`.
    """
    pl.semaphore_wait(passed, jax.lax.axis_size(axis_name) - 1)


def _routes(parcels: Sequence[Parcel], ranks: int) -> Array:
    """Return target and source rank of each rank and parcel [ranks 2*parcels] i32, or -1."""
    routes = np.full((ranks, 2 * len(parcels)), -1, np.int32)
    for at, (_, pairs) in enumerate(parcels):
        for source, target in pairs:
            routes[source, 2 * at] = target
            routes[target, 2 * at + 1] = source
    return jnp.asarray(routes)


def _is_step(grid: tuple[int, ...], which: int) -> Any:
    """Return whether this is the first (0) or the last (-1) step of the grid."""
    is_here = True
    for axis, size in enumerate(grid):
        is_here &= pl.program_id(axis) == (0 if which == 0 else size - 1)
    return is_here
