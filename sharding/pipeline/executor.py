# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Executes a schedule of a pipeline, in a region over `stage`.

One loop for each run of ticks with the same kinds of work. A tick:

    gradients that later stages made in the tick before arrive, while F computes
    enter   if a micro-batch enters: its stream, equal on all stages; its first group keeps it
    F       forward of one group
    leave   if a micro-batch leaves: its loss and the gradient of its stream, on all stages
    B       backward of one group, computing its forward again from the kept input
    W       gradients of the weights of one group, where the schedule defers them
    home    if the backward pass of a micro-batch ends: what it gives the embedding
    activations of F arrive at the next stage

Micro-batches may leave out groups, or pass through them in another order. Activations and gradients
are then sent for each hop of the table, to the next stage, to the one after it and to the one
before, and as many micro-batches may enter, leave and end in one tick: one for each hop from the
embedding and to the head.

All stages execute a kind of work that any stage has in the tick, so that no branch depends on the
stage and every collective may stand inside. A stage without work computes on zeros or on old
values, with the gradient zero; what it computes is stored where no stage reads.

The executor moves arrays. `PipelineParts` computes them.

Compiled for TPUs (v5e:2x4, four stages, libtpu 0.0.42), two of the four permutes of a tick have
products between start and done; the other two are waited for at once.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from sharding.axes import STAGE
from sharding.pipeline.buffers import Number as Number
from sharding.pipeline.buffers import add_to, read, store, where, zeros
from sharding.pipeline.schedule import Schedule
from sharding.pipeline.slots import StageSlots, plan_slots
from sharding.pipeline.split import Halves, split
from sharding.regions import sum_over
from sharding.stored_programs import store_no_programs_on_cpus

Stream = Any
"""What flows from layer to layer: a tree of floating-point arrays of one micro-batch."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PipelineParts:
    """A model in three parts; each function is called by all stages in the same tick."""

    enter: Callable[[Number], tuple[Stream, Any]]
    """micro-batch -> (the stream before the first group, equal on all stages; sums, which are added
    if the schedule has no backward pass: `home` has them otherwise)."""
    forward: Callable[[Any, Stream, Number, Number], tuple[Stream, Any]]
    """(parameters of the group, stream, micro-batch, chunk) -> (stream, sums)."""
    backward: Callable[[Any, Stream, Number, Number, Any, Stream, Bool[Array, ""]], Any]
    """(parameters of the group, stream, micro-batch, chunk, sums of the micro-batches before,
    gradient of the result, whether there is work) -> (gradient of the parameters, gradient of the
    stream, sums). Without work the gradients must be zero, and the sums are ignored."""
    leave: Callable[[Stream, Number, Any], tuple[Any, Stream]]
    """(stream after the last group, equal on all stages; micro-batch; sums of the micro-batches
    before, None while shapes are found) -> (sums, gradient of the stream, equal on all stages; None
    if the schedule has no backward pass)."""
    home: Callable[[Stream, Number, Any], Any]
    """(gradient of what entered, equal on all stages; micro-batch; sums of the micro-batches
    before, None while shapes are found) -> sums."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PipelineSums:
    """Sums over the micro-batches."""

    stages: Any
    """Sums of the groups of this stage, with a leading dimension of chunks."""
    gradients: Any
    """Gradients of the parameters of this stage, [chunks ...]; None without backward."""
    left: Any
    """Sums of `leave`."""
    entered: Any
    """Sums of `home`; without backward those of `enter`."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _TickState:
    inputs: Any
    """Streams that groups wait to read: slots, and one that no group reads."""
    arrived: Any
    """Gradients of streams, the same way; None if there is one group."""
    heads: Any
    """Gradients from `leave` that wait for their B; None if they never do."""
    deferred: Any
    """What B left for W, the same way; None without W."""
    sent: Any
    """Gradient of the stream that B made last."""
    sums: PipelineSums


@dataclasses.dataclass(frozen=True, kw_only=True)
class _ScheduleExecutor:
    schedule: Schedule
    slots: StageSlots
    parts: PipelineParts
    parameters: Any
    """Parameters of the stage, [chunks ...]."""
    stream: Any
    """Shapes of a stream."""
    arguments: tuple[Any, ...]
    """Shapes of the arguments of `PipelineParts.backward`."""
    halves: Halves | None
    """The backward pass of a group in two halves, B and W; None if there is no W."""

    @classmethod
    def of(cls, schedule: Schedule, parts: PipelineParts, parameters: Any) -> _ScheduleExecutor:
        """Return the executor of a schedule; see `execute`."""
        number = jax.ShapeDtypeStruct((), jnp.int32)
        stream, _ = jax.eval_shape(parts.enter, number)
        group = jax.eval_shape(lambda: read(parameters, jnp.int32(0)))
        _, sums = jax.eval_shape(parts.forward, group, stream, number, number)
        has_work = jax.ShapeDtypeStruct((), jnp.bool_)
        arguments = (group, stream, number, number, sums, stream, has_work)
        halves = None
        if schedule.has_deferred:
            is_kept = [argument is group for argument in arguments]
            halves = split(parts.backward, arguments, is_kept=is_kept, is_late=_is_of_matrix)
        return cls(
            schedule=schedule,
            slots=plan_slots(schedule),
            parts=parts,
            parameters=parameters,
            stream=stream,
            arguments=arguments,
            halves=halves,
        )

    def start(self) -> _TickState:
        """Return the carry before the first tick: zeros."""
        slots = self.slots
        number = jax.ShapeDtypeStruct((), jnp.int32)
        of_stream = partial(zeros, self.stream)
        sums = self.arguments[4]
        results, _ = jax.eval_shape(self.parts.leave, self.stream, number, None)
        _, entered = jax.eval_shape(self.parts.enter, number)
        gradients = None
        if self.schedule.has_backward:
            entered = jax.eval_shape(self.parts.home, self.stream, number, None)
            gradients, *_ = jax.eval_shape(self.parts.backward, *self.arguments)
            gradients = zeros(gradients, self.schedule.chunks)
        return _TickState(
            inputs=of_stream(slots.num_inputs + 1),
            arrived=of_stream(slots.num_gradients + 1) if slots.num_gradients else None,
            heads=of_stream(slots.num_heads + 1) if slots.num_heads else None,
            deferred=self.halves and zeros(self.halves.handed, slots.num_deferred + 1),
            sent=of_stream() if self.schedule.has_backward else None,
            sums=PipelineSums(
                stages=zeros(sums, self.schedule.chunks),
                gradients=gradients,
                left=zeros(results),
                entered=zeros(entered),
            ),
        )

    def group(self, chunk: Number) -> Any:
        """Return the parameters of one group of this stage."""
        return read(self.parameters, chunk)

    def tick(
        self, kinds: str, has_arrivals: bool, carry: _TickState, row: dict[str, Any]
    ) -> tuple[_TickState, None]:
        """Return the carry after one tick.

        Args:
            kinds: Kinds of work in the tick.
            has_arrivals: Whether gradients arrive.
            carry: The carry before.
            row: Row of each array of the slots, one number per stage or one for all; a tuple of
                them for fields by hop.
        """
        stage = jax.lax.axis_index(STAGE)
        row = jax.tree.map(
            lambda value: (
                jax.lax.dynamic_index_in_dim(value, stage, 0, keepdims=False)
                if value.ndim
                else value
            ),
            row,
        )
        if has_arrivals:
            for hop, slot in zip(self.schedule.hops, row["g_arrives"], strict=True):
                came = self._send(carry.sent, -hop)
                carry = replace(carry, arrived=store(carry.arrived, came, slot))
        sent = []
        gradient = None
        if "F" in kinds:
            carry, result = self._forward(carry, row)
            sent = [self._send(result, hop) for hop in self.schedule.hops]
            carry, gradient = self._leave(carry, row, result)
        if "B" in kinds:
            if carry.heads is not None:
                gradient = read(carry.heads, row["head_out"])
            carry = self._backward(carry, row, zeros(self.stream) if gradient is None else gradient)
        if "W" in kinds:
            carry = self._weights(carry, row)
        for stream, slot in zip(sent, row["arrives"], strict=False):
            carry = replace(carry, inputs=store(carry.inputs, stream, slot))
        return carry, None

    def _enter(self, carry: _TickState, micro: Number, slot: Number) -> _TickState:
        def enter(total: Any) -> tuple[Stream, Any]:
            stream, sums = self.parts.enter(micro)
            if self.schedule.has_backward:
                return stream, total
            return stream, jax.tree.map(operator.add, total, sums)

        stream, entered = jax.lax.cond(
            micro >= 0,
            enter,
            lambda total: (zeros(self.stream), total),
            carry.sums.entered,
        )
        inputs = store(carry.inputs, stream, slot)
        return replace(carry, inputs=inputs, sums=replace(carry.sums, entered=entered))

    def _forward(self, carry: _TickState, row: dict[str, Any]) -> tuple[_TickState, Stream]:
        for micro, slot in zip(row["enters"], row["enter_slot"], strict=True):
            carry = self._enter(carry, micro, slot)
        inputs = carry.inputs
        chunk = jnp.maximum(row["f_chunk"], 0)
        stream = read(inputs, row["f_input"])
        micro = jnp.maximum(row["f_micro"], 0)
        result, sums = self.parts.forward(self.group(chunk), stream, micro, chunk)
        if not self.schedule.has_backward:  # otherwise B sums them, in order
            stages = add_to(carry.sums.stages, where(row["f_input"] >= 0, sums), chunk)
            carry = replace(carry, sums=replace(carry.sums, stages=stages))
        return carry, result

    def _leave(
        self, carry: _TickState, row: dict[str, Any], result: Stream
    ) -> tuple[_TickState, Stream | None]:
        """Return the gradient of the head, or None where it waits in the carry."""
        gradient = None

        def stay(result: Stream, results: Any) -> tuple[Any, Stream | None]:
            del result
            return results, zeros(self.stream) if self.schedule.has_backward else None

        for hop, micro in enumerate(row["leaves"], 1):
            last, _ = self.schedule.place(self.schedule.num_groups - hop)

            def leave(
                result: Stream, results: Any, micro: Number = micro, last: int = last
            ) -> tuple[Any, Stream | None]:
                sums, gradient = self.parts.leave(_from_stage(result, last), micro, results)
                return jax.tree.map(operator.add, results, sums), gradient

            results, gradient = jax.lax.cond(micro >= 0, leave, stay, result, carry.sums.left)
            carry = replace(carry, sums=replace(carry.sums, left=results))
            if carry.heads is not None:
                slot = row["head_in"][hop - 1]
                carry = replace(carry, heads=store(carry.heads, gradient, slot))
        return carry, gradient if carry.heads is None else None

    def _backward(self, carry: _TickState, row: dict[str, Any], from_head: Stream) -> _TickState:
        has_work = row["b_input"] >= 0
        chunk = jnp.maximum(row["b_chunk"], 0)
        gradient = from_head
        if carry.arrived is not None:
            arrived = read(carry.arrived, row["b_gradient"])
            is_inner = row["b_gradient"] >= 0
            gradient = jax.tree.map(lambda a, h: jnp.where(is_inner, a, h), arrived, from_head)
        arguments = (
            self.group(chunk),
            read(carry.inputs, row["b_input"]),
            jnp.maximum(row["b_micro"], 0),
            chunk,
            read(carry.sums.stages, chunk),
            where(has_work, gradient),
            has_work,
        )
        if self.halves is None:
            d_group, d_stream, sums = self.parts.backward(*arguments)
        else:
            (d_group, d_stream, sums), handed = self.halves.early(*arguments)
            carry = replace(carry, deferred=store(carry.deferred, handed, row["w_in"]))
        totals = carry.sums
        entered = carry.sums.entered
        for hop, micro in enumerate(row["returns"], 1):
            first, _ = self.schedule.place(hop - 1)

            def come_home(
                d_stream: Stream, total: Any, micro: Number = micro, first: int = first
            ) -> Any:
                added = self.parts.home(_from_stage(d_stream, first), micro, total)
                return jax.tree.map(operator.add, total, added)

            entered = jax.lax.cond(micro >= 0, come_home, lambda _, total: total, d_stream, entered)
        totals = replace(
            totals,
            stages=add_to(totals.stages, where(has_work, sums), chunk),
            gradients=add_to(totals.gradients, d_group, chunk),
            entered=entered,
        )
        return replace(carry, sent=d_stream, sums=totals)

    def _weights(self, carry: _TickState, row: dict[str, Any]) -> _TickState:
        chunk = jnp.maximum(row["w_chunk"], 0)
        waited = read(carry.deferred, row["w_out"])
        d_group, _, _ = cast("Halves", self.halves).late(waited, self.group(chunk))
        d_group = where(row["w_out"] >= 0, d_group)
        gradients = add_to(carry.sums.gradients, d_group, chunk)
        return replace(carry, sums=replace(carry.sums, gradients=gradients))

    def _send(self, stream: Stream, step: int) -> Stream:
        """Return what the stage `step` before this one holds; stages form a ring."""
        number = self.schedule.stages
        pairs = [(stage, (stage + step) % number) for stage in range(number)]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, STAGE, pairs), stream)


def execute(schedule: Schedule, parts: PipelineParts, parameters: Any) -> PipelineSums:
    """Execute a schedule; called in a region over `stage`.

    Args:
        schedule: Table of the work, for as many stages as the mesh has.
        parts: Functions of the model.
        parameters: Parameters of the groups of this stage, [chunks ...].

    Returns:
        The sums over micro-batches. What `leave` and `home` return is summed over micro-batches,
        not over stages.
    """
    store_no_programs_on_cpus()
    executor = _ScheduleExecutor.of(schedule, parts, parameters)
    slots = executor.slots
    carry = executor.start()
    for run in schedule.runs():
        rows = _rows(slots, run.first, run.length)
        has_arrivals = any((hop >= 0).any() for hop in rows["g_arrives"])
        rows = jax.tree.map(jnp.asarray, rows)
        carry, _ = jax.lax.scan(partial(executor.tick, run.kinds, has_arrivals), carry, rows)
    return carry.sums


def _rows(slots: StageSlots, first: int, length: int) -> dict[str, Any]:
    """Return the rows of some ticks of every array of the slots."""
    fields = {field.name: getattr(slots, field.name) for field in dataclasses.fields(slots)}
    arrays = {name: value for name, value in fields.items() if not isinstance(value, int)}
    return jax.tree.map(lambda value: value[first : first + length], arrays)


def _from_stage(stream: Stream, stage: int) -> Stream:
    """Return what one stage holds, on all stages."""
    is_here = jax.lax.axis_index(STAGE) == stage
    return sum_over(STAGE, where(is_here, stream))


def _is_of_matrix(results: tuple[Any, Stream, Any]) -> Any:
    """Return for each result of the backward pass whether it is the gradient of matrices.

    Those have three dimensions, layers included. Gradients of vectors are cheap, and their inputs
    are not.
    """
    d_group, *gradients = results
    return jax.tree.map(lambda x: x.ndim >= 3, d_group), *jax.tree.map(lambda _: False, gradients)
