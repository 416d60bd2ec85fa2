# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Computes the shares of a model that a mesh and its rules give to one device.

They depend on mesh, fold, rules and on whether the dispatcher spreads experts
(`DeviceLayout.record`): a search computes them once for all numbers of micro-batches, remats,
schedules and dispatchers.

    a parameter, sharded over the axes of its spec, is gathered for use over all of them but the
    tensor axis of dense layers, and the experts' own axes if the dispatcher sends rows to them
    a copy that is gathered once a step is sharded by its own rules
    the layers of the staged scan are sharded over stages, also in use, and so is the vocabulary

To add a share of a parameter: a field of `ParameterShares` and its value in `_shares`, in
`jaxmoe/planning/device_layout.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Hashable, Iterable, Mapping
from typing import NamedTuple

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxmoe.execution import ExecutionConfig, Remat, keeps_attention
from jaxmoe.layers.context import FeedForwardSizes
from jaxmoe.models.flops import flops_per_token, matmul_parameters, stack_mixing_flops
from jaxmoe.models.stacks import LayerStack
from jaxmoe.parameters import ParameterSpec, ParameterTable
from jaxmoe.planning.abstract_step import StepPlan
from jaxmoe.planning.parameter_layouts import kept_axes
from jaxmoe.planning.pipelines import Passes
from jaxmoe.training.pipeline.stages import ModelParts
from sharding import axes as ax
from sharding.pipeline import PipelineOrder
from sharding.rules import LogicalAxisRules

PassesKey = tuple[str, int, int, PipelineOrder | None, bool]
"""Name of a scan, layers, micro-batches, pipeline, and whether its stages never wait."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ParameterShares:
    """Mesh axes and values of one parameter on a device; of the axes those larger than 1."""

    row: ParameterSpec
    stack: LayerStack | None
    """Layers that it belongs to; None outside of layers."""
    axes: tuple[str, ...]
    """Axes over which it is sharded."""
    copied_axes: tuple[str, ...]
    """Axes over which the copy is sharded that layers read: the parameter, where none is gathered
    once a step."""
    kept_axes: tuple[str, ...]
    """Axes over which it stays sharded in use."""
    gathered_axes: tuple[str, ...]
    """Axes over which it is gathered for use."""
    replicated_axes: tuple[str, ...]
    """Axes over which its gradients are summed and it is not sharded."""
    local: int
    """Values stored on one device."""
    copy_values: int
    """Values on one device of the copy that layers read."""
    in_use: int
    """Values on one device in use, summed over layers."""
    layers: int
    """Layers stacked in it on one device; 1 if it is not stacked."""
    moment: int
    """Values on one device of an array of the optimiser state with its shape."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StackFlops:
    """FLOPs of a token in the layers of a stack, forward and backward, nothing recomputed."""

    products: float
    """Products with matrices that every token meets."""
    experts: float
    """Products with the matrices of routed experts."""
    mixing: float
    """Attention, recurrences and the mixing of residual streams."""
    is_recurrent: bool
    """Whether the mixer is recurrent, whose kernels keep nothing by name."""

    @property
    def total(self) -> float:
        """FLOPs of all of them."""
        return self.products + self.experts + self.mixing

    def again(self, remat: Remat) -> float:
        """Return the FLOPs that the backward pass computes again.

        The last of an expert's three products is not: its gradient needs none of its results.

        Args:
            remat: Rematerialisation of the layers.
        """
        if remat == "none":
            return 0.0
        products = 0.0 if remat == "dots" else self.products
        experts = 0.0 if remat in ("dots", "kernels") else self.experts * 2 / 3
        mixing = 0.0 if keeps_attention(remat) and not self.is_recurrent else self.mixing
        return (products + experts + mixing) / 3


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TokenFlops:
    """FLOPs of a token, forward and backward, nothing recomputed."""

    total: float
    by_stack: dict[str, StackFlops]
    """FLOPs in the layers of a stack, by its path."""

    @classmethod
    def of(cls, plan: StepPlan) -> TokenFlops:
        """Return the FLOPs of the tokens of a plan, which are the same on every mesh."""
        model, table, length = plan.model, plan.table, plan.sequence_length
        by_stack = {}
        for stack in model.stacks:
            rows = [row for row in table if row.path.startswith(f"{stack.path}/")]
            routed = [row for row in rows if ax.EXPERTS in row.declaration.axes]
            experts = 6.0 * matmul_parameters(model, ParameterTable(tuple(routed)))
            total = 6.0 * matmul_parameters(model, ParameterTable(tuple(rows)))
            by_stack[stack.path] = StackFlops(
                products=total - experts,
                experts=experts,
                mixing=stack_mixing_flops(model, stack, length),
                is_recurrent=stack.kind.mixer.is_recurrent,
            )
        return cls(total=flops_per_token(model, table, length), by_stack=by_stack)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceLayout:
    """Shares of one device of a mesh."""

    plan: StepPlan
    """A plan on the mesh; of its choices only those of `record` are read."""
    flops: TokenFlops
    """FLOPs of a token on all devices."""

    @staticmethod
    def record(execution: ExecutionConfig) -> tuple[Hashable, ...]:
        """Return all that differs between the layouts of the executions that a search compares."""
        spreads_experts = execution.dispatcher.traits.spreads_experts
        return execution.mesh, execution.fold, execution.rules, spreads_experts

    @functools.cached_property
    def mesh(self) -> dict[str, int]:
        """Devices along each mesh axis."""
        return self.plan.mesh_sizes

    @functools.cached_property
    def rules(self) -> LogicalAxisRules:
        """Rules from logical axes to mesh axes."""
        return self.plan.execution.axis_rules

    @functools.cached_property
    def itemsize(self) -> int:
        """Bytes per value in matrix products."""
        return jnp.dtype(self.plan.execution.precision.compute_dtype).itemsize

    @functools.cached_property
    def stacks(self) -> tuple[LayerStack, ...]:
        """Stacks of the model."""
        return tuple(self.plan.model.stacks)

    @functools.cached_property
    def feed_forwards(self) -> dict[str, FeedForwardSizes]:
        """Sizes of the feed-forward of each stack, by its path."""
        return {stack.path: stack.kind.feed_forward.sizes for stack in self.stacks}

    @functools.cached_property
    def parameters(self) -> dict[str, ParameterShares]:
        """Shares of each parameter, by its path and in the order of the table."""
        return {row.path: _shares(self, row) for row in self.plan.table}

    @functools.cached_property
    def parts(self) -> ModelParts:
        """What enters a pipeline, its stages, and what leaves it."""
        return ModelParts.of(self.plan.model)

    @functools.cached_property
    def passes(self) -> dict[PassesKey, Passes]:
        """Passes through the layers of a scan; filled as they are asked for."""
        return {}

    @functools.cached_property
    def _shards(self) -> dict[str, int]:
        return {}

    @functools.cached_property
    def _pieces(self) -> dict[tuple[str, ...], tuple[str, ...]]:
        return {}

    @functools.cached_property
    def _groups(self) -> dict[tuple[str, ...], tuple[tuple[str, ...], int]]:
        return {}

    @functools.cached_property
    def _splits(self) -> dict[Hashable, _ParameterSplit]:
        return {}

    def split(self, row: ParameterSpec) -> _ParameterSplit:
        """Return the mesh axes of a parameter, which it shares with those with its logical axes."""
        key = row.declaration.axes, row.spec
        if key not in self._splits:
            self._splits[key] = _split(self, row)
        return self._splits[key]

    def shards(self, name: str) -> int:
        """Return the number of shards of a logical axis."""
        if name not in self._shards:
            self._shards[name] = self.devices(self.rules.mesh_axes(name))
        return self._shards[name]

    def devices(self, axes: Iterable[str]) -> int:
        """Return the devices along some axes together."""
        return math.prod(self.mesh[axis] for axis in axes)

    def pieces(self, *axes: str) -> tuple[str, ...]:
        """Return the mesh axes larger than 1 that are one of these or a piece of one."""
        if axes not in self._pieces:
            names = ax.pieces(tuple(self.mesh), axes)
            self._pieces[axes] = tuple(axis for axis in names if self.mesh[axis] > 1)
        return self._pieces[axes]

    def group(self, axes: tuple[str, ...]) -> tuple[tuple[str, ...], int]:
        """Return the axes in the order of the mesh, and the devices along them together."""
        if axes not in self._groups:
            ordered = tuple(axis for axis in self.mesh if axis in axes)
            self._groups[axes] = ordered, self.devices(ordered)
        return self._groups[axes]


class _ParameterSplit(NamedTuple):
    """Mesh axes of the parameters with the same logical axes, and the devices along them."""

    axes: tuple[str, ...]
    copied: tuple[str, ...]
    kept: tuple[str, ...]
    gathered: tuple[str, ...]
    replicated: tuple[str, ...]
    shards: int
    shards_of_copy: int
    shards_in_use: int
    shards_of_moment: int


def _split(layout: DeviceLayout, row: ParameterSpec) -> _ParameterSplit:
    execution, mesh = layout.plan.execution, layout.mesh
    layout_of_state = execution.state_layout
    copies = layout_of_state.copies
    axes = _wide_axes(row.spec, mesh)
    copied = axes if copies is None else _wide_axes(copies.resolve(row.declaration.axes), mesh)
    moments = layout_of_state.optimizer.resolve(row.declaration.axes)
    splits = kept_axes(row, execution, mesh)
    kept = tuple(axis for axis in axes if axis in splits)
    batch_axes = layout.pieces(*ax.BATCH_AXES, ax.SEQ, ax.TENSOR)
    return _ParameterSplit(
        axes=axes,
        copied=copied,
        kept=kept,
        gathered=tuple(axis for axis in axes if axis not in kept),
        replicated=tuple(axis for axis in batch_axes if axis not in axes),
        shards=layout.devices(axes),
        shards_of_copy=layout.devices(copied),
        shards_in_use=layout.devices(kept),
        shards_of_moment=layout.devices(_wide_axes(moments, mesh)),
    )


def _shares(layout: DeviceLayout, row: ParameterSpec) -> ParameterShares:
    split = layout.split(row)
    stacks = (stack for stack in layout.stacks if row.path.startswith(f"{stack.path}/"))
    size = row.size
    layers = 1
    if row.declaration.is_stacked:
        layers = row.shape[0] // layout.shards(row.declaration.axes[0])
    return ParameterShares(
        row=row,
        stack=next(stacks, None),
        axes=split.axes,
        copied_axes=split.copied,
        kept_axes=split.kept,
        gathered_axes=split.gathered,
        replicated_axes=split.replicated,
        local=size // split.shards,
        copy_values=size // split.shards_of_copy,
        in_use=size // split.shards_in_use,
        layers=layers,
        moment=size // split.shards_of_moment,
    )


def _wide_axes(spec: PartitionSpec, mesh: Mapping[str, int]) -> tuple[str, ...]:
    names = [entry if isinstance(entry, tuple) else (entry,) for entry in spec if entry]
    return tuple(axis for axes in names for axis in axes if mesh[axis] > 1)
