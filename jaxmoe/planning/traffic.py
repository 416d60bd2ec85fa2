# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Computes the bytes that one device sends in a train step, by mesh axes and reason.

With n devices along the axes, W the bytes of the whole array and f = (n - 1) / n:

    weights      gathered for use                        f W          forward, and in a backward
                                                                      pass that recomputes
    gradients    scattered as weights were gathered      f W          backward
                 all-reduced over the copies             2 f W        backward
    tensor       activations of a layer, in and out      2 f T' D b   forward and backward
    attention    over sharded sequences                  by its form  forward and backward
    rows         to their experts and back, if sent      2 f A D b    forward and backward
    shuffle      of tokens to their experts' devices     2 f T D b    forward and backward
    tokens       gathered to experts, sums scattered     2 f n T D b  forward and backward
    whole        s matrices that the optimiser brings    2 f s m n 4  once per step, the others per
    matrices     together on one device, and back                     micro-batch
    activations  from stage to stage                     T D b        every tick of a pipeline; a
                                                                     ladder residual has three
    vocabulary   sums over the stages of what enters,    8 f T D b    micro-batch
                 leaves, and of both gradients
    chunks       layers to the stages of their chunks    2 f W        once per step

Recomputation under remat sends rows once more, as dispatchers that do not keep them do, and gathers
weights that are otherwise kept for the backward pass. Where it keeps the results of attention, a
ring sends nothing once more; forms that exchange heads or gather keys beside the kernel do. Layers
are passed through as often as `jaxmoe/planning/pipelines.py` counts, idle ticks included; layouts
that gather once a step do so whatever the number of micro-batches. Messages are counted as in
rings: n - 1 each way, and once for all gradients of a layer that are all-reduced over the same
copies, which XLA combines. Sources: Megatron-LM (arXiv 2104.04473), ZeRO (arXiv 1910.02054),
sections on communication. Sums over router statistics and norms (kilobytes) are left out.

Bytes of each form of attention: `sharding/sequence_parallel/traffic.py`.

The embedding table is gathered once per micro-batch; so is the head where the loss is computed in
chunks, and once per direction otherwise.

To add a reason: a function that yields `Traffic`, and its line in `traffic_of`, in
`jaxmoe/planning/traffic.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Literal

import jax.numpy as jnp

from jaxmoe.execution import keeps_attention
from jaxmoe.layers.context import heads_of
from jaxmoe.layers.sequences import choose_form
from jaxmoe.models.stacks import LayerStack
from jaxmoe.planning.abstract_step import StepPlan
from jaxmoe.planning.device_layout import ParameterShares
from jaxmoe.planning.pipelines import Passes
from jaxmoe.planning.sizes import Sizes
from sharding import axes as ax
from sharding.sequence_parallel.traffic import repeated_bytes, sent_bytes

Times = Literal["gathers", "once", "reductions"]
HIDEABLE = ("weights", "gradients", "gradients of copies")
"""Reasons whose messages only the next layer or the update waits for."""


@dataclasses.dataclass(kw_only=True, slots=True)
class Traffic:
    """Bytes and messages that one device sends for one reason in one step.

    Not frozen: a search makes hundreds of thousands.
    """

    reason: str
    axes: tuple[str, ...]
    """Mesh axes of the devices that communicate."""
    num_devices: int
    """Devices along the axes together."""
    bytes: float
    messages: float


def step_traffic(plan: StepPlan) -> list[Traffic]:
    """Return the traffic of a step, summed by reason and axes.

    Args:
        plan: Step to estimate.
    """
    return traffic_of(Sizes.of(plan))


def traffic_of(sizes: Sizes) -> list[Traffic]:
    """Return the same of a step whose sizes are known.

    Args:
        sizes: Sizes of the step.
    """
    entries = [*_weights(sizes), *_tensor(sizes), *_attention(sizes)]
    entries += [*_rows(sizes), *_whole_matrices(sizes), *_stages(sizes), *_chunks(sizes)]
    return _sum_by_reason(entries)


def waited_traffic(sizes: Sizes) -> Iterator[Traffic]:
    """Yield the traffic of activations, which a step waits for and which costs little to compute.

    Args:
        sizes: Sizes of the step.
    """
    yield from _tensor(sizes)
    yield from _attention(sizes)
    yield from _rows(sizes)
    yield from _stages(sizes)


def _sum_by_reason(entries: Iterable[Traffic]) -> list[Traffic]:
    groups: dict[tuple[str, tuple[str, ...]], list[Traffic]] = {}
    for entry in entries:
        groups.setdefault((entry.reason, entry.axes), []).append(entry)
    return [
        Traffic(
            reason=reason,
            axes=axes,
            num_devices=group[0].num_devices,
            bytes=sum(entry.bytes for entry in group),
            messages=sum(entry.messages for entry in group),
        )
        for (reason, axes), group in groups.items()
    ]


def _traffic(sizes: Sizes, reason: str, axes: tuple[str, ...], shared: float, times: float):
    """Yield traffic, or nothing if the axes hold one device."""
    axes, num = sizes.layout.group(axes)  # mesh order, for the sums
    if num > 1:
        yield Traffic(
            reason=reason,
            axes=axes,
            num_devices=num,
            bytes=times * shared * (num - 1) / num,
            messages=times * (num - 1),
        )


def _weights(sizes: Sizes) -> Iterator[Traffic]:
    plan = sizes.plan
    together: dict[tuple[str, tuple[str, ...], float], float] = {}
    for parameter in sizes.parameters.values():
        passes = sizes.parameter_passes(parameter)
        gathers = gathers_of(sizes, parameter, passes)
        for _, entry in parameter_traffic(sizes, parameter, gathers, passes.weights):
            yield entry
        if parameter.row.is_frozen:
            continue
        # A layer's gradients with the same copies are reduced together, as XLA combines them.
        key = parameter.row.path.partition("/")[0], parameter.replicated_axes, passes.trained
        together[key] = together.get(key, 0.0) + parameter.local * sizes.itemsize / parameter.layers
    for (_, copies, trained), local in together.items():
        yield from copies_traffic(sizes, copies, local, trained)
    if plan.execution.rules == "zero1":
        inner = sizes.pieces(ax.DATA, ax.EXPERT, ax.SEQ)
        yield from _traffic(
            sizes, "updates", inner, 4.0 * sum(map(sizes.local, plan.table.trained_rows)), 1
        )


def parameter_traffic(
    sizes: Sizes, shares: ParameterShares, gathers: float, reductions: float
) -> Iterator[tuple[Times, Traffic]]:
    """Yield the traffic of one parameter and its gradients but for their sums over copies, each
    entry with how often it is sent.

    Args:
        sizes: Sizes of the step.
        shares: The parameter.
        gathers: Times that it is gathered for use.
        reductions: Times that its gradients are reduced.
    """
    axes, copied = shares.gathered_axes, shares.copied_axes
    near = tuple(axis for axis in axes if axis in copied)  # at every use
    far = tuple(axis for axis in axes if axis not in copied)  # once a step
    shared = shares.in_use * sizes.itemsize / shares.layers
    piece = shared / sizes.devices(near)
    for entry in _traffic(sizes, "weights", near, shared, gathers):
        yield "gathers", entry
    for entry in _traffic(sizes, "weights", far, piece, shares.layers):
        yield "once", entry
    if not shares.row.is_frozen:
        for entry in _traffic(sizes, "gradients", near, shared, reductions):
            yield "reductions", entry
        for entry in _traffic(sizes, "gradients", far, piece, reductions):
            yield "reductions", entry


def copies_traffic(
    sizes: Sizes, axes: tuple[str, ...], size: float, times: float
) -> Iterator[Traffic]:
    """Yield the traffic of gradients that are summed over copies.

    Args:
        sizes: Sizes of the step.
        axes: Mesh axes of the copies.
        size: Bytes that are summed together.
        times: How often in a step.
    """
    yield from _traffic(sizes, "gradients of copies", axes, size, 2 * times)


def gathers_of(sizes: Sizes, shares: ParameterShares, passes: Passes) -> float:
    """Return how often a parameter is gathered for use in a step.

    Args:
        sizes: Sizes of the step.
        shares: The parameter.
        passes: Passes through it.
    """
    return passes.forward + passes.trained * _gathers(sizes, shares)


def gathered_as(shares: ParameterShares) -> str:
    """Return the role of a parameter that is gathered otherwise than its layers, else nothing."""
    role = shares.row.declaration.role
    return role if role in ("head", "embedding") else ""


def _gathers(sizes: Sizes, shares: ParameterShares) -> int:
    """Return how often a weight is gathered for one forward and backward pass."""
    execution = sizes.plan.execution
    is_chunked = 0 < execution.loss_chunk < sizes.plan.sequence_length
    layers = 1 if sizes.parameter_remat(shares) == "none" else 2
    by_role = {"head": 1 if is_chunked else 2, "embedding": 1}
    if sizes.plan.model.has_tied_embeddings:
        by_role["embedding"] += by_role["head"]
    return by_role.get(gathered_as(shares), layers)


def _forward(sizes: Sizes, stack: LayerStack) -> float:
    """Return the forward passes through a stack's layers, recomputation under remat included."""
    passes = sizes.stack_passes(stack)
    return passes.forward + passes.trained * (1 if sizes.remat(stack) == "none" else 2)


def _both(sizes: Sizes, stack: LayerStack) -> float:
    """Return the forward and backward passes through a stack's layers."""
    return _forward(sizes, stack) + sizes.stack_passes(stack).trained


def _tensor(sizes: Sizes) -> Iterator[Traffic]:
    model = sizes.plan.model
    stream = sizes.inner_tokens * model.embed_dim * sizes.itemsize
    times = 0.0
    for stack in sizes.stacks:
        # The mixer, and the feed-forward where it is dense or has shared experts.
        fed = sizes.layout.feed_forwards[stack.path]
        sums = 1 + (fed.dense_dim + fed.shared_dim > 0)
        times += 2 * sums * _both(sizes, stack)
    yield from _traffic(sizes, "tensor", sizes.pieces(ax.TENSOR), stream, times)


def _attention(sizes: Sizes) -> Iterator[Traffic]:
    plan = sizes.plan
    if sizes.shards(ax.ACT_SEQ_INNER) == 1:
        return
    form = choose_form(plan.model.context, plan.execution, plan.sequence_length, sizes.mesh).config
    axes = sizes.pieces(ax.SEQ)
    for stack in sizes.stacks:
        heads = heads_of(stack.kind.mixer)
        if heads is None:
            continue
        attention = sizes.attention(heads)
        passes = sizes.stack_passes(stack)
        remat = sizes.remat(stack)
        is_kept = keeps_attention(remat)
        again = 0.0 if remat == "none" else passes.trained
        forward = passes.forward + passes.trained + (0.0 if is_kept else again)
        total = 0.0
        number = 0.0
        for times, is_backward in ((forward, False), (passes.trained, True)):
            total += times * sent_bytes(form, attention, is_backward=is_backward)
            number += times * form.num_messages(attention, is_backward=is_backward)
        if is_kept:
            total += again * repeated_bytes(form, attention)
            number += again * form.num_repeated(attention)
        yield Traffic(
            reason="attention", axes=axes, num_devices=attention.ranks, bytes=total, messages=number
        )


def _rows(sizes: Sizes) -> Iterator[Traffic]:
    plan = sizes.plan
    if not plan.execution.dispatcher.traits.spreads_experts:
        return
    value = plan.model.embed_dim * sizes.itemsize
    rules = plan.execution.axis_rules
    shared = sizes.expert_axes
    for stack in sizes.stacks:
        if not stack.kind.feed_forward.is_routed:
            continue
        experts = sizes.layout.feed_forwards[stack.path]
        times = 2 * _both(sizes, stack)
        if not plan.execution.dispatcher.traits.gathers_tokens:
            shared = rules.mesh_axes(ax.EXPERT_MLP)
            sent = sizes.rows(experts) * value
            is_again = not plan.execution.dispatcher.keeps_rows
            sends = times + is_again * sizes.stack_passes(stack).trained
            yield from _traffic(sizes, "rows", rules.mesh_axes(ax.EXPERTS), sent, sends)
        if plan.execution.dispatcher.traits.token_route is not None:
            moved = sizes.tokens * value
            yield from _traffic(sizes, "shuffle", rules.mesh_axes(ax.EXPERTS), moved, times)
        everyone = sizes.devices(shared) * sizes.tokens
        yield from _traffic(sizes, "tokens", shared, everyone * value, times)


def _whole_matrices(sizes: Sizes) -> Iterator[Traffic]:
    optimizer = sizes.plan.optimizer_config
    for row in sizes.plan.table:
        is_whole = optimizer.traits(row.hyper.group).has_whole_matrices
        if not is_whole or row.declaration.matrix is None:
            continue
        first, second = row.declaration.matrix
        dims = {d % len(row.shape) for d in (*first, *second)}
        entries = [row.spec[d] for d in sorted(dims) if d < len(row.spec)]
        names = [e if isinstance(e, tuple) else (e,) for e in entries if e is not None]
        axes = tuple(axis for name in names for axis in name if sizes.mesh[axis] > 1)
        yield from _traffic(sizes, "whole matrices", axes, sizes.local(row) * 4.0, 2)


def _stages(sizes: Sizes) -> Iterator[Traffic]:
    plan = sizes.plan
    stages = sizes.mesh[ax.STAGE]
    if stages == 1:
        return
    stream = sizes.tokens * plan.model.embed_dim * sizes.itemsize
    pipeline_counts = sizes.counts
    axes = (ax.STAGE,)
    sent = (pipeline_counts.forward + pipeline_counts.backward) * pipeline_counts.hops
    yield Traffic(
        reason="activations",
        axes=axes,
        num_devices=stages,
        bytes=sent * plan.model.residual.arrays * stream,
        messages=float(sent),
    )
    yield from _traffic(sizes, "vocabulary", axes, stream, 4 * 2 * plan.accumulation)


def _chunks(sizes: Sizes) -> Iterator[Traffic]:
    plan, axes = sizes.plan, (ax.STAGE,)
    if sizes.mesh[ax.STAGE] == 1 or plan.execution.pipeline_order.chunks == 1:
        return
    is_whole = plan.execution.state_layout.gathered == "step"
    staged = [row for row in plan.table if ax.LAYERS in row.declaration.axes]
    width = jnp.dtype(plan.execution.precision.parameter_dtype).itemsize
    num_bytes = width * sum(map(sizes.local, staged))
    if is_whole:
        num_bytes = sizes.itemsize * sum(map(sizes.copy_values, staged))
    yield from _traffic(sizes, "chunks", axes, num_bytes, 1)
    trained = [row for row in staged if not row.is_frozen]
    yield from _traffic(sizes, "chunks", axes, 4.0 * sum(map(sizes.local, trained)), 1)
