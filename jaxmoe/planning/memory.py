# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Estimates the memory of one device in a train step, by category and phase, in closed form.

    total       = arguments + results that are not arguments + temporaries
    arguments   = state and batch, each array by `device_bytes`: exact
    temporaries = the largest of the phases, each with the gradients (float32, sharded as the
                  parameters) and the parameters in the dtype of products (sharded, made once)

    layers      activations saved of all layers, and the working set of one layer's backward pass
    head        the same activations, the head's matrix and its gradient, the logits of one chunk
    embedding   the table gathered, and its whole gradient
    update      the optimiser's directions, the matrices that a group brings together whole, and
                state that is brought from host memory

On a mesh with stages the layers are those of one group, and a pipeline holds, in every phase but
the update, with a = T D b of one micro-batch,

    (inputs kept + gradients and head gradients that wait + 4) a

each buffer has a slot that no stage reads, and two streams are on their way. The backward pass adds
the gradients of a group to those of the step; more than one chunk brings the parameters to their
stages. Layers before the stages belong to the phase of the embedding, those after it to the head's.

The experts are the largest part of a layer's backward pass: with E' experts on a device, A rows and
b bytes per value,

    gathered  3 E' D F b      their gradients  3 E' D F * 4      rows  (4 A D + 4 A F) b
    and if products are narrower than parameters, the gradients in transit in b bytes and, because
    TPUs on a square torus sum them before scattering, their sum: 2 * 3 E' D F b
    gathered experts of a TPU without stages: gradients, transit and sum of one matrix at a time,
    beside one gathered matrix less where hidden units are kept; nothing but the gathered matrices
    where gradients are scattered as they are summed: each takes the place of its matrix

Attention without a kernel keeps, once for all layers, a mask of N S^2 * 9/16 bytes for each
sequence (the compiler hoists it). What a mixer keeps and needs at a time, its config states
(`activations`): attention about ten arrays [T N H]. Saved per layer: with remat "full" the input;
with "attention" its output as well, with "kernels" also 2 A F b of experts, with "dots" also the
dense products; with "none" everything that the backward pass reads,
gathered expert weights included; of experts 2 A F b, and where rows that travel are kept, or no
loop is left, A D b. On a CPU an unrolled loop saves as with "none", whatever remat says, and of
experts that are spread three arrays [A F] of the backward pass, which its compiler computes as soon
as their inputs exist.

The terms were read off compiled programs; their factors count arrays of one shape that exist at the
same time, and are not fitted. Compilers may do better (fusion) or worse (padding of narrow shards,
copies between layouts): experiments/README.md has measurements. Fragmentation and the additional
rows of an unbalanced routing are not modelled.

To add a term: a field of `MemoryEstimate` and its phase in `jaxmoe/planning/memory_estimate.py`,
and its value here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxmoe.execution import Remat
from jaxmoe.layers.context import heads_of
from jaxmoe.models.stacks import LayerStack, Scan
from jaxmoe.parameters import ParameterSpec
from jaxmoe.planning.abstract_step import StepPlan, abstract_batch, abstract_state
from jaxmoe.planning.device_bytes import device_bytes
from jaxmoe.planning.hardware import Platform
from jaxmoe.planning.memory_estimate import MemoryEstimate
from jaxmoe.planning.pipelines import counts
from jaxmoe.planning.sizes import Sizes
from jaxmoe.training.pipeline.stages import ModelParts
from jaxmoe.training.state import TrainState, layers_on_host
from sharding import axes as ax

# Arrays of one shape that exist at once in the backward pass of a layer; see the module docstring.
_STREAM_ARRAYS = 4
_LOGIT_ARRAYS = 3
_MASK_SHARE = 9 / 16
# One part is updated while the next one arrives and the last one leaves.
_PARTS_AT_ONCE = 3
# One layer is used while the next one arrives and the gradient of the last one leaves.
_STREAMED_LAYERS = 3
_LANES = 128


class HeldStack(NamedTuple):
    """Layers whose activations exist at one time."""

    stack: LayerStack
    layers: float
    """Layers on one device."""
    share: float = 1.0
    """Part of the stack's layers on the device."""


def estimate_memory(
    plan: StepPlan,
    platform: Platform,
    state: TrainState | None = None,
    sizes: Sizes | None = None,
) -> MemoryEstimate:
    """Return the memory of one device in a train step.

    Args:
        plan: Step to estimate.
        platform: Platform with the array layouts.
        state: `abstract_state` of the plan, where it is known; it costs most of the time.
        sizes: Sizes of the plan, where they are known.
    """
    mesh = plan.mesh
    state = abstract_state(plan, mesh) if state is None else state
    without_state = least_memory(Sizes.of(plan) if sizes is None else sizes, platform)

    def of(tree: object) -> int:
        return device_bytes(jax.tree.leaves(tree), platform)

    parameters = of(state.params)
    on_device = [
        leaf
        for leaf in jax.tree.leaves(state.opt_state)
        if plan.execution.optimizer_memory == "device" or not leaf.ndim
    ]
    optimizer, elsewhere = of(on_device), of(state.opt_state) - of(on_device)
    names = layers_on_host(plan.model, plan.execution)
    away = of([state.params[name] for name in names])
    share, disk = _share_at_once(plan), 0.0
    # The old state and the new one exist during a step; gradients lie beside parameters.
    host = 2.0 * (elsewhere + away) + away
    if plan.execution.optimizer_memory == "files":
        host, disk = elsewhere * share, 2.0 * elsewhere
    return dataclasses.replace(
        without_state,
        parameters=parameters - away,
        optimizer=optimizer,
        batch=of(abstract_batch(plan, mesh)),
        other_state=of(state) - parameters - optimizer - elsewhere,
        arriving=_STREAMED_LAYERS * _of_one_layer(plan, state.params, platform),
        # Parameters and gradients in host memory arrive with the state.
        update=without_state.update + (elsewhere + 2 * away) * share,
        host=host,
        disk=disk,
    )


def least_memory(sizes: Sizes, platform: Platform) -> MemoryEstimate:
    """Return the memory of a step without its optimiser's state, with parameters that are not
    padded: no more than it needs, and nothing is traced for it.

    Args:
        sizes: Sizes of the step.
        platform: Platform with the array layouts.
    """
    plan = sizes.plan
    names = layers_on_host(plan.model, plan.execution)
    dtype = plan.execution.precision.parameter_dtype
    stored = [row for row in plan.table if row.path.split("/")[0] not in names]
    return MemoryEstimate(
        parameters=sum(sizes.local(row) * row.stored_dtype(dtype).itemsize for row in stored),
        optimizer=0,
        batch=0,
        other_state=0,
        logits=_logits(sizes),
        embedding=_embedding(sizes),
        update=_update(sizes),
        **(_without_stages if plan.execution.mesh.stage == 1 else _with_stages)(sizes, platform),
    )


def _without_stages(sizes: Sizes, platform: Platform) -> dict[str, float]:
    """Return the fields about layers of a step that passes through all of them at once."""
    plan = sizes.plan
    shares = [HeldStack(stack, stack.num_calls) for stack in plan.model.stacks]
    names = layers_on_host(plan.model, plan.execution)
    rows = [row for row in plan.table.trained_rows if row.path.split("/")[0] not in names]
    gradients = _gradients(sizes, rows, platform)
    layer, experts = _largest_layer(sizes, shares, platform)
    return {
        "gradients": gradients * (2 if plan.accumulation > 1 else 1),
        "copies": _copies(sizes),
        "saved": _save(sizes, shares, platform),
        "masks": _masks(sizes, plan.model.scans, platform),
        "layer": layer,
        "experts": experts,
    }


def _with_stages(sizes: Sizes, platform: Platform) -> dict[str, float]:
    """Return the same of a pipeline, and its own fields."""
    plan = sizes.plan
    execution, parts = plan.execution, ModelParts.of(plan.model)
    stages, chunks = execution.mesh.stage, execution.pipeline_order.chunks
    number = stages * chunks
    group = [
        HeldStack(stack, stack.num_layers / number, 1 / chunks) for stack in parts.staged.stacks
    ]
    staged = [row for row in plan.table if ax.LAYERS in row.declaration.axes]
    trained = [row for row in staged if not row.is_frozen]
    gradients = _gradients(sizes, plan.table.trained_rows, platform)
    copies, layers = _copies(sizes), _largest_layer(sizes, group, platform)
    if chunks > 1:  # parameters at the stages of their chunks
        is_whole = execution.state_layout.gathered == "step"
        width = jnp.dtype(execution.precision.parameter_dtype).itemsize
        values, size = (sizes.copy_values, sizes.itemsize) if is_whole else (sizes.local, width)
        copies += sum(map(values, staged)) * size
    pipeline_counts = counts(execution.pipeline_order, stages, plan.accumulation, plan.paths)
    slots = (
        pipeline_counts.inputs
        + pipeline_counts.gradients
        + (pipeline_counts.heads + 1 if pipeline_counts.heads else 0)
        + 2
    )
    stream = plan.model.residual.arrays * sizes.tokens * plan.model.embed_dim * sizes.itemsize
    deferred = (
        (pipeline_counts.deferred + 1) * _defer(sizes, group, platform)
        if pipeline_counts.deferred
        else 0.0
    )
    return {
        "gradients": gradients + _gradients(sizes, trained, platform) / chunks,
        "copies": copies,
        "saved": _save(sizes, group, platform),
        "masks": _masks(sizes, (parts.staged,), platform),
        "layer": layers[0],
        "experts": layers[1],
        "streams": (slots + 2) * stream + deferred,
        "before": _outside(sizes, parts.before, platform),
        "after": _outside(sizes, parts.after, platform),
    }


def _defer(sizes: Sizes, shares_of_stacks: Sequence[HeldStack], platform: Platform) -> float:
    """Return what B leaves for W: inputs of products, and gradients of their results."""
    width, total = sizes.plan.model.embed_dim, 0.0
    # The fused experts of the XLA implementation, which CPUs use, are not split.
    kernel = sizes.plan.execution.implementations.grouped_swiglu
    is_fused = platform == "cpu" and kernel in (None, "xla")
    for share in shares_of_stacks:
        mixer, fed = sizes.activations(share.stack), share.stack.kind.feed_forward.sizes
        values = (mixer.projected + mixer.output) / sizes.itemsize + 2 * width
        if fed.dense_dim:
            values += 2 * width + (1 + fed.num_projections) * fed.dense_dim / sizes.shards(
                ax.ACT_MLP
            )
        layer = sizes.inner_tokens * values
        if fed.num_experts:
            layer += sizes.tokens * (width + fed.num_experts)
            if not is_fused:
                layer += sizes.places(fed) * (
                    2 * width + (1 + fed.num_projections) * fed.expert_dim
                )
        total += share.layers * layer
    return total * sizes.itemsize


def _outside(sizes: Sizes, scans: tuple[Scan, ...], platform: Platform) -> float:
    """Return the activations and the working set of layers that no stage has alone."""
    shares_of_stacks = [
        HeldStack(stack, stack.num_layers) for scan in scans for stack in scan.stacks
    ]
    if not shares_of_stacks:
        return 0.0
    needed = _save(sizes, shares_of_stacks, platform) + _masks(sizes, scans, platform)
    return needed + sum(_largest_layer(sizes, shares_of_stacks, platform))


def _copies(sizes: Sizes) -> float:
    """Return the parameters in the dtype of products, made once a step."""
    plan = sizes.plan
    if plan.execution.parameter_memory == "host":
        return 0.0
    if plan.execution.state_layout.gathered == "step":
        return float(sum(map(sizes.copy_values, plan.table)) * sizes.itemsize)
    if sizes.itemsize < jnp.dtype(plan.execution.precision.parameter_dtype).itemsize:
        return float(sum(map(sizes.local, _of_layers(plan))) * sizes.itemsize)
    return 0.0


def _gradients(sizes: Sizes, rows: Iterable[ParameterSpec], platform: Platform) -> float:
    """Return sharded gradients; a TPU may pad narrow shards of stacked experts to 128 lanes."""
    total = 0
    for row in rows:
        values, cut = sizes.local(row), row.spec[-1] if len(row.spec) == len(row.shape) else None
        is_padded = platform == "tpu" and not _reduces_matrices_apart(sizes.plan, platform)
        if is_padded and cut is not None and ax.EXPERTS in row.declaration.axes:
            width = row.shape[-1] // sizes.devices(cut if isinstance(cut, tuple) else (cut,))
            values = values // width * (-(-width // _LANES) * _LANES)
        total += values
    return 4.0 * total


def _save(sizes: Sizes, shares_of_stacks: Sequence[HeldStack], platform: Platform) -> float:
    plan = sizes.plan
    secondary = 0.0
    if plan.execution.state_layout.gathered == "replica":
        copies = sizes.devices(sizes.pieces(ax.REPLICA))
        secondary = _of_held(plan, shares_of_stacks, sizes.local) * copies * sizes.itemsize
    total = secondary
    for share in shares_of_stacks:
        remat = sizes.remat(share.stack) if _is_loop(plan, share.stack, platform) else "none"
        total += share.layers * _save_layer(sizes, share.stack, remat, platform)
        if remat == "none":
            total += _of_held(plan, [share], sizes.in_use, ax.EXPERTS) * sizes.itemsize
    return total


def _save_layer(sizes: Sizes, stack: LayerStack, remat: Remat, platform: Platform) -> float:
    """Return the activations that one layer keeps for its backward pass."""
    model, execution = sizes.plan.model, sizes.plan.execution
    token, inner = sizes.tokens * sizes.itemsize, sizes.inner_tokens * sizes.itemsize
    stream = token * model.embed_dim
    inputs = model.residual.arrays * stream
    mixer, fed = sizes.activations(stack), stack.kind.feed_forward.sizes
    dense = (1 + fed.num_projections) * inner * fed.dense_dim / sizes.shards(ax.ACT_MLP)
    rows = sizes.places(fed) * sizes.itemsize
    attention = sizes.inner_tokens * mixer.named
    kernels = attention + rows * fed.num_projections * fed.expert_dim
    match remat:
        case "offload":  # the host keeps them
            return 0.0
        case "full":
            return inputs
        case "attention":
            return inputs + attention
        case "kernels":
            return inputs + kernels
        case "dots":
            products = stream + sizes.inner_tokens * mixer.projected + dense
            return inputs + products + kernels
        case "none":
            is_loop = _is_loop(sizes.plan, stack, platform)
            is_ahead = not is_loop and execution.dispatcher.traits.spreads_experts
            is_sent = sizes.devices(sizes.expert_axes) > 1 and execution.dispatcher.keeps_rows
            has_rows = _is_unrolled(sizes.plan, stack, platform) or is_sent
            arrays = fed.num_projections + (3 if is_ahead else 0)
            width = arrays * fed.expert_dim + (model.embed_dim if has_rows else 0)
            looked_up = token * fed.read_dim
            mixed = sizes.inner_tokens * mixer.kept
            return inputs + 3 * stream + mixed + rows * width + looked_up + dense


def _is_loop(plan: StepPlan, stack: LayerStack, platform: Platform) -> bool:
    """Return whether the passes of a layer are apart: not where a CPU computes all unrolled, see
    `ExecutionConfig.unroll`."""
    return platform != "cpu" or not _is_unrolled(plan, stack, platform)


def _is_unrolled(plan: StepPlan, stack: LayerStack, platform: Platform) -> bool:
    """Return whether no loop over layers is left."""
    length, execution = stack.num_layers, plan.execution
    return execution.mesh.stage == 1 and 1 < length <= execution.unroll_of(length, platform)


def _of_held(
    plan: StepPlan,
    shares_of_stacks: Sequence[HeldStack],
    values: Callable[[ParameterSpec], int],
    axis: str | None = None,
) -> float:
    """Return the values of the parameters of layers; with an axis, of those that have it."""
    return sum(
        share.share * values(row)
        for share in shares_of_stacks
        for row in plan.table
        if row.path.startswith(f"{share.stack.path}/")
        and (axis is None or axis in row.declaration.axes)
    )


def _masks(sizes: Sizes, scans: Sequence[Scan], platform: Platform) -> float:
    plan = sizes.plan
    # None chooses the kernel on a TPU: `pallas_kernels.OPERATIONS["flash_attention"]`.
    without_kernel = ("xla",) if platform == "tpu" else (None, "xla")
    if plan.execution.implementations.attention not in without_kernel:
        return 0.0
    parts = sizes.shards(ax.ACT_SEQ_INNER)  # by queries or by heads
    # One for each kind of mixer in a loop, as long as the loop runs.
    heads = max(
        sum(map(sizes.heads, {heads for mixer in mixers if (heads := heads_of(mixer))}))
        for mixers in ([stack.kind.mixer for stack in scan.stacks] for scan in scans)
    )
    return sizes.sequences * heads * plan.sequence_length**2 * _MASK_SHARE / parts


def _largest_layer(
    sizes: Sizes, shares_of_stacks: Sequence[HeldStack], platform: Platform
) -> tuple[float, float]:
    """Return the working set of the layer that needs most, without its experts and of them."""
    pairs = [
        (_layer(sizes, share.stack), _experts(sizes, share.stack, platform))
        for share in shares_of_stacks
    ]
    return max(pairs, key=sum)


def _layer(sizes: Sizes, stack: LayerStack) -> float:
    model = sizes.plan.model
    streams = _STREAM_ARRAYS - 1 + model.residual.arrays
    stream = streams * model.embed_dim * sizes.itemsize
    return sizes.inner_tokens * (sizes.activations(stack).working + stream)


def _experts(sizes: Sizes, stack: LayerStack, platform: Platform) -> float:
    plan, experts = sizes.plan, stack.kind.feed_forward.sizes
    rows = [row for row in _of_experts(plan) if row.path.startswith(f"{stack.path}/")]
    weights = sum(sizes.in_use(row) / sizes.layers(row) for row in rows)
    width = 4 * plan.model.embed_dim + (2 + experts.num_projections) * experts.expert_dim
    narrow = sizes.itemsize < jnp.dtype(plan.execution.precision.parameter_dtype).itemsize
    travelling = 2 * sizes.itemsize if narrow else 0
    activations = sizes.places(experts) * width * sizes.itemsize
    gathered, gradients = weights, weights
    if _reduces_matrices_apart(plan, platform):
        gradients = weights / (1 + experts.num_projections)
        if all(_scatters_sum(sizes, row) for row in rows):
            gradients = 0.0
        elif sizes.remat(stack) in ("kernels", "dots", "none"):
            gathered -= gradients
    return gathered * sizes.itemsize + gradients * (4 + travelling) + activations


def _reduces_matrices_apart(plan: StepPlan, platform: Platform) -> bool:
    """Return whether the gradients of an expert's three matrices are reduced one after another, and
    none is padded: what libtpu makes of the kernels' layout, outside of stages."""
    spreads = plan.execution.dispatcher.traits.spreads_experts
    return platform == "tpu" and plan.execution.mesh.stage == 1 and not spreads


def _scatters_sum(sizes: Sizes, row: ParameterSpec) -> bool:
    """Return whether the gradient of an expert's matrix is scattered as it is summed.

    libtpu sums it whole, and cuts it then, where a group has all devices of the step, and where a
    device's part of a matrix's dimension is no whole tile, of 32 bytes in the second-minor one.
    """
    gathered = {*sizes.parameters[row.path].gathered_axes}
    for axes, name, length in zip(row.spec, row.declaration.axes, row.shape, strict=False):
        axes = axes if isinstance(axes, tuple) else (axes,)
        number = sizes.devices(gathered.intersection(axes))
        if number == 1:
            continue
        is_whole = name == ax.EXPERTS or length // number % (32 // sizes.itemsize) == 0
        if number == sizes.devices(sizes.mesh) or not is_whole:
            return False
    return True


def _logits(sizes: Sizes) -> float:
    plan = sizes.plan
    model, chunk, tokens = plan.model, plan.execution.loss_chunk, sizes.inner_tokens
    if chunk:
        tokens = min(tokens, sizes.sequences * chunk)
    head = _of_role(plan, "head") or _of_role(plan, "embedding")
    logits = tokens * model.vocab_size / sizes.shards(ax.ACT_VOCAB)
    return _LOGIT_ARRAYS * logits * 4 + sum(map(sizes.in_use, head)) * (sizes.itemsize + 4)


def _embedding(sizes: Sizes) -> float:
    rows = _of_role(sizes.plan, "embedding")
    return sum(map(sizes.in_use, rows)) * (sizes.itemsize + 4.0)


def _of_one_layer(plan: StepPlan, params: Any, platform: Platform) -> float:
    """Return the stored parameters of the largest layer, or period, that lie in host memory."""
    lengths = {scan.name: scan.length for scan in plan.model.scans}
    return max(
        (
            device_bytes(jax.tree.leaves(params[name]), platform) / lengths[name]
            for name in layers_on_host(plan.model, plan.execution)
        ),
        default=0.0,
    )


def _update(sizes: Sizes) -> float:
    """Return two arrays like the parameters, and four of the largest matrix that is whole."""
    rows, optimizer = sizes.plan.table.trained_rows, sizes.plan.optimizer_config
    matrices = [row for row in rows if optimizer.traits(row.hyper.group).has_whole_matrices]
    spread = max(map(sizes.local, matrices), default=0)
    names = layers_on_host(sizes.plan.model, sizes.plan.execution)
    shares = {name: _share_at_once(sizes.plan) for name in names}
    num_bytes = sum(sizes.local(row) * shares.get(row.path.split("/")[0], 1.0) for row in rows)
    return 4.0 * (2 * num_bytes + 4 * spread)


def _share_at_once(plan: StepPlan) -> float:
    """Return the share of state in host memory that is on the device at one time."""
    return min(1.0, _PARTS_AT_ONCE / plan.execution.optimizer_parts)


def _of_role(plan: StepPlan, role: str) -> list[ParameterSpec]:
    return [row for row in plan.table if row.declaration.role == role]


def _of_layers(plan: StepPlan) -> list[ParameterSpec]:
    return [row for row in plan.table if row.declaration.is_stacked]


def _of_experts(plan: StepPlan) -> list[ParameterSpec]:
    return [row for row in plan.table if ax.EXPERTS in row.declaration.axes]
