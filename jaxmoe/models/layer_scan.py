# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Runs the layers of a model: each `Scan` as one loop over stacked parameters, rematerialised."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array

from jaxmoe.execution import ExecutionConfig, Remat
from jaxmoe.layers.block import STREAM, Block
from jaxmoe.layers.context import LayerContext
from jaxmoe.layers.gather import SECONDARY, WHOLE, gather_across_replicas, use_whole
from jaxmoe.layers.observer import Observations, interleave, join_stacks
from jaxmoe.layers.records import Flow, FlowTokens, LayerInputs, LayerOutputs
from jaxmoe.layers.view import VIEW, Rewrite, SaveOutsideViews, check_view, rewritten
from jaxmoe.models.cache import Cache
from jaxmoe.models.config import ModelConfig
from jaxmoe.models.stacks import Layer, LayerStack, Scan
from jaxmoe.models.streamed_scan import StreamedScan
from jaxmoe.routing import RouterStatistics
from pallas_kernels.flash_attention import ATTENDED
from pallas_kernels.grouped_swiglu import HIDDEN
from sharding.expert_parallel.permute import ORDER


class Cycle(nn.Module):
    """The layers of one period, with separate parameters.

    Attributes:
        blocks: `Block` of each layer of the period, with the transformations that it has.
        layers: Kinds of the layers of the period.
        context: Model-wide numbers.
        execution: How they are computed.
        train: Whether routers behave as in training.
    """

    blocks: tuple[Callable[..., nn.Module], ...]
    layers: tuple[Layer, ...]
    context: LayerContext
    execution: ExecutionConfig
    train: bool

    @nn.compact
    def __call__(
        self, stream: Flow, inputs: dict[str, LayerInputs], tokens: FlowTokens
    ) -> tuple[Flow, dict[str, LayerOutputs]]:
        """Compute the layers one after the other; inputs and outputs are by place in the period."""
        outputs = {}
        for place, (block, kind) in enumerate(zip(self.blocks, self.layers, strict=True)):
            name = str(place)
            layer = block(
                kind.mixer, kind.feed_forward, self.context, self.execution, self.train, name=name
            )
            if isinstance(stream, tuple) or stream.cache is None:  # halves of the rows have none
                stream, outputs[name] = layer(stream, inputs[name], tokens)
                continue
            caches = stream.cache
            before = dataclasses.replace(stream, cache=caches[name])
            after, outputs[name] = layer(before, inputs[name], tokens)
            stream = dataclasses.replace(after, cache=caches | {name: after.cache})
        return stream, outputs


def scan_layers(
    scan: Scan,
    context: LayerContext,
    execution: ExecutionConfig,
    *,
    train: bool,
    block: type[nn.Module] = Block,
    is_gathered: bool = False,
    rewrite: Rewrite | None = None,
) -> nn.Module:
    """Return the module of a scan, called as `(stream, inputs, tokens) -> (stream, outputs)`.

    Args:
        scan: Layers to compute.
        context: Model-wide numbers.
        execution: How they are computed.
        train: Whether routers behave as in training.
        block: Module class of a layer, see `RowTransform.layer`.
        is_gathered: Whether a collection of gathered parameters is given beside the cut ones.
        rewrite: Function of the parameters of one layer, see `jaxmoe.layers.view`; or None.
    """
    if rewrite is not None:
        check_view(execution)
    if execution.parameter_memory == "host":
        return _stream(scan, context, execution, block, train=train)
    unroll = execution.unroll_of(scan.length)
    transformed = partial(
        _block,
        block,
        execution=execution,
        is_gathered=is_gathered,
        rewrite=rewrite,
        is_loop=unroll < scan.length,
    )
    blocks = tuple(
        transformed(stack.kind, _part_name(scan, place)) for place, stack in enumerate(scan.stacks)
    )
    body: Any = Cycle if scan.is_cycle else blocks[0]
    scanned: Any = nn.scan(
        body,
        # Intermediates exist when a caller captures them.
        variable_axes={"params": 0, "intermediates": 0, WHOLE: 0, VIEW: 0},
        split_rngs={"params": True},
        in_axes=(0, nn.broadcast),  # pyright: ignore[reportArgumentType]
        out_axes=0,
        length=scan.length,
        unroll=unroll,
        metadata_params={nn.PARTITION_NAME: scan.axis, "size": scan.length},
    )
    if scan.is_cycle:
        kinds = tuple(stack.kind for stack in scan.stacks)
        return scanned(blocks, kinds, context, execution, train, name=scan.name)
    (stack,) = scan.stacks
    kind = stack.kind
    return scanned(kind.mixer, kind.feed_forward, context, execution, train, name=scan.name)


def _stream(
    scan: Scan, context: LayerContext, execution: ExecutionConfig, block: Any, *, train: bool
) -> nn.Module:
    """Return the module of a scan whose parameters lie in host memory; see `scan_layers`."""
    kinds = tuple(stack.kind for stack in scan.stacks)

    def build() -> nn.Module:
        if scan.is_cycle:
            return Cycle((block,) * len(kinds), kinds, context, execution, train, parent=None)
        (kind,) = kinds
        return block(kind.mixer, kind.feed_forward, context, execution, train, parent=None)

    return StreamedScan(
        build,
        scan.length,
        execution.unroll_of(scan.length),
        any(execution.remat_of(kind.feed_forward.is_routed) == "offload" for kind in kinds),
        name=scan.name,
    )


def _part_name(scan: Scan, place: int) -> str:
    """Return the name of a layer's parameters for a view."""
    return f"{scan.name}/{place}" if scan.is_cycle else scan.name


def _block(
    block: Any,
    kind: Layer,
    part: str,
    *,
    execution: ExecutionConfig,
    is_gathered: bool,
    rewrite: Rewrite | None,
    is_loop: bool,
) -> Any:
    """Return the module of a layer with its transformations."""
    if rewrite is not None:
        block = rewritten(block, rewrite, part, execution.precision.compute_dtype)
    elif is_gathered:
        block = use_whole(block)
    elif execution.state_layout.gathered == "replica":
        block = gather_across_replicas(block, execution.precision.compute_dtype)
    remat = execution.remat_of(kind.feed_forward.is_routed)
    if remat == "none" and rewrite is None:
        return block
    policy = remat_policy(remat)
    if rewrite is not None and remat in ("none", "dots"):
        policy = SaveOutsideViews(policy)
    # A loop keeps its forward and its backward pass apart. Without one XLA would find the second
    # computation of a layer equal to the first, and keep what was to be computed again.
    return nn.remat(block, policy=policy, prevent_cse=not is_loop)


def scan_inputs(
    model: ModelConfig,
    scan: Scan,
    router_state: Any,
    key: Array | None,
    turn: int = 0,
) -> Any:
    """Return the inputs of a scan's layers: a record, or in a period one by place in it.

    Args:
        model: Number of layers.
        scan: Layers to compute.
        router_state: State of the routers, stacked over MoE layers.
        key: PRNG key of the step, or None.
        turn: Number of the call of the scan, which has keys and caches of its own.
    """
    if key is not None and turn:
        key = jax.random.fold_in(key, turn)
    keys = None if key is None else jax.random.split(key, model.num_layers)

    def of(stack: LayerStack) -> LayerInputs:
        return LayerInputs(
            router_state=_part(router_state, stack.moe_layers) if stack.moe_layers else {},
            key=None if keys is None else _part(keys, stack.layers),
            moe_layer=_numbers(stack),
            stack_layer=turn * stack.num_layers + jnp.arange(stack.num_layers, dtype=jnp.int32),
        )

    return _by_place(scan, [of(stack) for stack in scan.stacks])


def with_cache(scan: Scan, flow: Any, cache: Cache | None) -> Any:
    """Return the stream with the caches of a scan: one, or in a period one by place in it.

    Args:
        scan: Layers to compute.
        flow: Stream, or those of two halves of the rows, which have no caches.
        cache: Caches of the model; None leaves the stream as it is.
    """
    if cache is None:
        return flow
    caches = _by_place(scan, [cache[stack.path] for stack in scan.stacks])
    return dataclasses.replace(flow, cache=caches)


def cache_by_path(scan: Scan, caches: Any) -> Cache:
    """Return the caches of a scan by path of their stacks, from its `Stream.cache`."""
    stacks = caches.values() if scan.is_cycle else [caches]
    return {stack.path: part for stack, part in zip(scan.stacks, stacks, strict=True)}


def _by_place(scan: Scan, parts: list[Any]) -> Any:
    """Return the only part, or in a period the parts by place in it."""
    return {str(place): part for place, part in enumerate(parts)} if scan.is_cycle else parts[0]


def join_outputs(
    scans: tuple[Scan, ...], outputs: list[Any]
) -> tuple[RouterStatistics | None, dict[str, Array], Observations | None]:
    """Join what the scans return into arrays over the layers of the model.

    Args:
        scans: Scans of the model.
        outputs: Output of each, in order.

    Returns:
        Statistics over MoE layers, losses of layers by name, and observations over all layers.
    """
    statistics = []
    losses = []
    observations = []
    by_name: dict[str, list[Array]] = {}
    for scan, output in zip(scans, outputs, strict=True):
        stacks = list(output.values()) if scan.is_cycle else [output]
        routed = [o for o in stacks if o.statistics is not None]
        if routed:
            statistics.append(_interleave([o.statistics for o in routed]))
            losses.append(_interleave([o.losses for o in routed]))
        for name, value in (
            (n, v) for o in stacks if o.statistics is None for n, v in o.losses.items()
        ):
            by_name.setdefault(name, []).append(value)
        known = [o.observations for o in stacks if o.observations is not None]
        if known:
            observations.append((interleave(known, scan.length), scan.num_layers))
    for own in losses:
        for name, value in own.items():
            by_name.setdefault(name, []).append(value)
    return (
        _concatenate(statistics),
        {name: _concatenate(own) for name, own in by_name.items()},
        join_stacks(observations) if observations else None,
    )


def remat_policy(remat: Remat) -> Any:
    """Return which values the backward pass finds stored; those gathered across replicas always.

    Args:
        remat: What is recomputed.
    """
    policies = jax.checkpoint_policies
    if remat == "none":
        return policies.everything_saveable
    secondary = policies.save_only_these_names(SECONDARY)
    if remat == "full":
        return secondary
    if remat == "offload":
        return policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[SECONDARY],
            names_which_can_be_offloaded=[STREAM],
            offload_src="device",
            offload_dst="pinned_host",
        )
    if remat == "attention":
        return policies.save_only_these_names(SECONDARY, ATTENDED)
    kernels = policies.save_only_these_names(SECONDARY, ATTENDED, HIDDEN, ORDER)
    if remat == "kernels":
        return kernels
    return policies.save_from_both_policies(policies.dots_with_no_batch_dims_saveable, kernels)


def _part(tree: Any, numbers: range) -> Any:
    """Return the entries of some layers from arrays stacked over layers."""
    chosen = slice(numbers.start, numbers.stop, numbers.step)
    return jax.tree.map(lambda leaf: leaf[chosen], tree)


def _numbers(stack: LayerStack) -> Array:
    """Return the number of each layer among the MoE layers; 0, 1, ... for dense layers."""
    numbers = stack.moe_layers or range(stack.num_layers)
    return numbers.start + numbers.step * jnp.arange(stack.num_layers, dtype=jnp.int32)


def _interleave(parts: list[Any]) -> Any:
    """Join the arrays of a period's layers [n ...] in the order of the layers [n * parts ...]."""
    if len(parts) == 1:
        return parts[0]
    return jax.tree.map(
        lambda *leaves: jnp.stack(leaves, 1).reshape(-1, *leaves[0].shape[1:]), *parts
    )


def _concatenate(parts: list[Any]) -> Any:
    """Join stacks of layers end to end; None when there are none."""
    if not parts:
        return None
    if len(parts) == 1:
        return parts[0]
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)
