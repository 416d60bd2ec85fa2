# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Cuts a model into what enters a pipeline, the layers of its stages, and what leaves it.

The scan with the most layers is cut into stages. The scans before it are computed with the
embedding, those after it with the head, by all stages alike.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from jaxmoe import combinations
from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.gather import WHOLE
from jaxmoe.layers.records import Stream, TokenInputs
from jaxmoe.models.config import ModelConfig
from jaxmoe.models.layer_scan import join_outputs, scan_inputs, scan_layers
from jaxmoe.models.stacks import Scan
from jaxmoe.routing import RouterStatistics
from jaxmoe.training.balance import buffered_losses, linearized_losses
from sharding import axes as ax


@dataclasses.dataclass(frozen=True, slots=True)
class ModelParts:
    """Names of the parameters of the three parts of a model."""

    before: tuple[Scan, ...]
    """Scans that are computed as a micro-batch enters."""
    staged: Scan
    """Scan that is cut into stages."""
    after: tuple[Scan, ...]
    """Scans that are computed as a micro-batch leaves."""

    @classmethod
    def of(cls, model: ModelConfig) -> ModelParts:
        """Return the parts of a model."""
        return _parts_of(model)


@functools.lru_cache(maxsize=64)
def _parts_of(model: ModelConfig) -> ModelParts:
    scans = model.scans
    (place,) = (i for i, scan in enumerate(scans) if scan.axis == ax.LAYERS)
    return ModelParts(scans[:place], scans[place], scans[place + 1 :])


@typing.no_type_check
@struct.dataclass
class LayerSums:
    """Sums of some layers over micro-batches."""

    statistics: RouterStatistics | None
    """Routing statistics, stacked over the MoE layers."""
    losses: dict[str, Float[Array, ""]]
    """Losses of the balancers."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Layers:
    """Some layers of a model, as training computes them."""

    scan: Scan
    """The layers; in a pipeline those of one group."""
    model: ModelConfig
    execution: ExecutionConfig
    router_state: Any
    """State of the routers of the whole model."""
    key: Array | None
    """PRNG key of the step."""
    share: float
    """Share of a micro-batch in the step."""
    batch_statistics: RouterStatistics | None
    """Statistics of the whole batch, of all MoE layers, if balance losses are linearized there."""
    train: bool

    def __call__(
        self,
        params: Any,
        stream: Stream,
        tokens: TokenInputs,
        first: Any,
        before: LayerSums | None,
    ) -> tuple[Stream, LayerSums]:
        """Return the stream after the layers, and their part of the sums, differentiable.

        Args:
            params: Parameters of the layers, gathered ones beside them under WHOLE.
            stream: Stream before them.
            tokens: Arrays of the micro-batch.
            first: Number of the first iteration of the scan.
            before: Sums over the micro-batches before this one; None for none.
        """
        full = next(scan for scan in self.model.scans if scan.name == self.scan.name)
        layers = scan_layers(
            self.scan,
            self.model.context,
            # The TPU compiler (libtpu 0.0.42) aborts at an unrolled loop in a region.
            dataclasses.replace(self.execution, unroll=1),
            train=self.train,
            is_gathered=WHOLE in params,
        )
        inputs = scan_inputs(self.model, full, self.router_state, self.key)
        length = self.scan.length

        def cut(leaf: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(leaf, first, length, 0)

        if length < full.length:
            inputs = jax.tree.map(cut, inputs)
        stream, outputs = layers.apply(params, stream, inputs, tokens)
        statistics, losses, _ = join_outputs((self.scan,), [outputs])
        losses = {name: self.share * jnp.sum(values) for name, values in losses.items()}
        if statistics is not None and self.train:
            losses |= self._balance(statistics, full, first, before)
        return stream, LayerSums(statistics=statistics, losses=losses)

    def _balance(
        self, statistics: RouterStatistics, full: Scan, first: Any, before: LayerSums | None
    ) -> dict[str, Array]:
        """Return the balancers' losses of these layers; they are sums over layers."""
        if self.batch_statistics is not None:
            number = statistics.counts.shape[0]
            start = min(stack.moe_layers.start for stack in full.stacks if stack.moe_layers)
            start += first * (number // self.scan.length)
            all_statistics = jax.tree.map(
                lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, start, number, 0),
                self.batch_statistics,
            )
            return linearized_losses(self.model, statistics, all_statistics, self.share)
        past = None if before is None else before.statistics
        losses = buffered_losses(self.model, statistics, past)
        return {name: self.share * value for name, value in losses.items()}


def check_pipeline(model: ModelConfig, execution: ExecutionConfig, accumulation: int) -> None:
    """Check, before anything is traced, that a pipeline can train a model.

    Args:
        model: Model to train.
        execution: Mesh with stages, and schedule.
        accumulation: Micro-batches of a step.

    Raises:
        ValueError: The stages do not divide the layers, the schedule does not fit the
            micro-batches, or another choice needs the layers of all stages at once.
    """
    combinations.check_between(model=model, execution=execution)
    check_stages(model, execution, accumulation)


def check_stages(model: ModelConfig, execution: ExecutionConfig, accumulation: int) -> None:
    """Check the sizes alone: what two choices do not combine is refused already.

    Args:
        model: Model to train.
        execution: Mesh with stages, and schedule.
        accumulation: Micro-batches of a step.

    Raises:
        ValueError: The stages do not divide the layers, or the schedule does not fit the
            micro-batches.
    """
    stages = execution.mesh.stage
    pipeline = execution.pipeline_order
    if stages == 1:
        return
    _check_cut(model, stages * pipeline.chunks)
    pipeline.check(stages, accumulation)


@functools.lru_cache(maxsize=64)
def _check_cut(model: ModelConfig, groups: int) -> None:
    cut_scan(ModelParts.of(model).staged, groups)


def cut_scan(scan: Scan, groups: int) -> Scan:
    """Return a scan with the layers of one of several equal groups: its first.

    Raises:
        ValueError: The groups do not divide the scan.
    """
    if scan.length % groups:
        kind = "periods of layers" if scan.is_cycle else "equal layers"
        raise ValueError(
            f"the {scan.length} {kind} of {scan.name} must be divisible by execution.mesh.stage x"
            f" execution.pipeline.chunks = {groups}, the number of equal groups: choose a product"
            f" that divides {scan.length}"
        )
    length = scan.length // groups
    stacks = tuple(
        dataclasses.replace(
            stack, layers=stack.layers[:length], moe_layers=stack.moe_layers[:length]
        )
        for stack in scan.stacks
    )
    return dataclasses.replace(scan, stacks=stacks)
