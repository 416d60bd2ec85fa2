# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Computes the sizes in a plan's formulas: tokens, rows and weights of one device.

All layouts come from the parameter table and the rules of the execution:

    T   tokens of one device's residual stream in one micro-batch: sharded by sequence and position
    T'  tokens inside a layer, where heads or hidden units are sharded instead of positions
    A   rows of its experts, T K: even, if rows are sent
    a parameter, sharded over the axes of its spec, is gathered for use over all of them but the
    tensor axis of dense layers, and the experts' own axes if the dispatcher sends rows to them
    a copy that is gathered once a step is sharded by its own rules
    the layers of the staged scan are sharded over stages, also in use, and so is the vocabulary
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxmoe.execution import Remat
from jaxmoe.layers.context import AttentionHeads, FeedForwardSizes, MixerActivations
from jaxmoe.layers.sequences import attention_sizes
from jaxmoe.models.stacks import LayerStack
from jaxmoe.parameters import ParameterSpec
from jaxmoe.planning.abstract_step import StepPlan
from jaxmoe.planning.parameter_layouts import kept_axes
from jaxmoe.planning.pipelines import Passes, passes
from sharding import axes as ax
from sharding.sequence_parallel import AttentionSizes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of one device in one micro-batch."""

    plan: StepPlan
    mesh: dict[str, int]
    """Devices along each mesh axis."""
    sequences: float
    """B on one device; a fraction if a sequence is sharded."""
    tokens: float
    """T: tokens of the residual stream."""
    inner_tokens: float
    """T': tokens inside a layer."""
    itemsize: int
    """Bytes per value in matrix products."""

    @classmethod
    def of(cls, plan: StepPlan) -> Sizes:
        """Return the sizes of a plan."""
        execution = plan.execution
        mesh = dict(plan.mesh.shape)
        rules = execution.axis_rules

        def shards(name: str) -> int:
            return math.prod(mesh[axis] for axis in rules.mesh_axes(name))

        sequences = plan.batch_size / plan.accumulation / shards(ax.ACT_BATCH)
        tokens = sequences * plan.sequence_length
        return cls(
            plan=plan,
            mesh=mesh,
            sequences=sequences,
            tokens=tokens / shards(ax.ACT_SEQ),
            inner_tokens=tokens / shards(ax.ACT_SEQ_INNER),
            itemsize=jnp.dtype(execution.precision.compute_dtype).itemsize,
        )

    def attention(self, heads: AttentionHeads | None = None) -> AttentionSizes:
        """Return the sizes of one attention layer on the sequences of one device.

        Args:
            heads: Heads of its mixer; when None those by which the form is chosen.
        """
        plan = self.plan
        sizes = attention_sizes(
            plan.model.context, plan.execution, plan.sequence_length, self.mesh, heads
        )
        return dataclasses.replace(sizes, sequences=self.sequences)

    def heads(self, heads: AttentionHeads) -> float:
        """Return N of a mixer on one device."""
        return heads.num_heads / self.shards(ax.ACT_HEADS)

    def activations(self, stack: LayerStack) -> MixerActivations:
        """Return the arrays of the mixer of one layer, in bytes per token."""
        return stack.kind.mixer.activations(self.shards, itemsize=self.itemsize)

    def rows(self, experts: FeedForwardSizes) -> float:
        """Return A, the rows that a device sends, and receives in a balanced batch."""
        return self.tokens * experts.top_k

    def balanced_rows(self) -> float:
        """Return the rows that the experts of a device receive in a balanced batch, the most of all
        layers; each expert's hidden units may be spread."""
        experts = [stack.kind.feed_forward.sizes for stack in self.stacks]
        return max(map(self.rows, experts), default=0.0) * self.shards(ax.EXPERT_MLP)

    def places(self, experts: FeedForwardSizes) -> float:
        """Return the rows for which the experts of a device have a place.

        Where rows travel it is the worst case, P T min(K, E / P) in a chunk, or what a capacity
        leaves of it.
        """
        sources = self.devices(self.expert_axes)
        num_local = experts.num_experts / self.shards(ax.EXPERTS)
        worst = sources * self.tokens * min(experts.top_k, num_local)
        return self.plan.execution.dispatcher.arriving_places(sent=self.rows(experts), worst=worst)

    @property
    def expert_axes(self) -> tuple[str, ...]:
        """Mesh axes over which experts and their hidden units are spread, if they are."""
        rules = self.plan.execution.axis_rules
        return rules.mesh_axes(ax.EXPERTS) + rules.mesh_axes(ax.EXPERT_MLP)

    def axes_of(self, row: ParameterSpec) -> tuple[str, ...]:
        """Return the mesh axes larger than 1 over which a parameter is sharded."""
        return self._wide(row.spec)

    def copied_axes(self, row: ParameterSpec) -> tuple[str, ...]:
        """Return the axes over which the copy is sharded that layers read: the parameter, where
        none is gathered once a step."""
        rules = self.plan.execution.state_layout.copies
        if rules is None:
            return self.axes_of(row)
        return self._wide(rules.resolve(row.declaration.axes))

    def _wide(self, spec: PartitionSpec) -> tuple[str, ...]:
        names = [entry if isinstance(entry, tuple) else (entry,) for entry in spec if entry]
        return tuple(axis for axes in names for axis in axes if self.mesh[axis] > 1)

    def kept_axes(self, row: ParameterSpec) -> tuple[str, ...]:
        """Return the axes over which a parameter stays sharded in use."""
        return self._only(row, kept_axes(row, self.plan.execution, self.mesh))

    def pieces(self, *axes: str) -> tuple[str, ...]:
        """Return the mesh axes larger than 1 that are one of these or a piece of one."""
        return tuple(axis for axis in ax.pieces(tuple(self.mesh), axes) if self.mesh[axis] > 1)

    def shards(self, name: str) -> int:
        """Return the number of shards of a logical axis."""
        return self.devices(self.plan.execution.axis_rules.mesh_axes(name))

    def _only(self, row: ParameterSpec, axes: Iterable[str]) -> tuple[str, ...]:
        chosen = set(axes)
        return tuple(axis for axis in self.axes_of(row) if axis in chosen)

    def gathered_axes(self, row: ParameterSpec) -> tuple[str, ...]:
        """Return the axes over which a parameter is gathered for use."""
        stored_axes = self.kept_axes(row)
        return tuple(axis for axis in self.axes_of(row) if axis not in stored_axes)

    def local(self, row: ParameterSpec) -> int:
        """Return the values of a parameter stored on one device."""
        return row.size // self.devices(self.axes_of(row))

    def copy_values(self, row: ParameterSpec) -> int:
        """Return the values on one device of the copy that layers read."""
        return row.size // self.devices(self.copied_axes(row))

    def in_use(self, row: ParameterSpec) -> int:
        """Return the values of a parameter on one device in use, summed over layers."""
        return row.size // self.devices(self.kept_axes(row))

    def devices(self, axes: Iterable[str]) -> int:
        """Return the devices along some axes together."""
        return math.prod(self.mesh[axis] for axis in axes)

    def layers(self, row: ParameterSpec) -> int:
        """Return the layers stacked in a parameter on one device; 1 if it is not stacked."""
        if not row.declaration.is_stacked:
            return 1
        return row.shape[0] // self.shards(row.declaration.axes[0])

    def remat(self, stack: LayerStack) -> Remat:
        """Return the rematerialisation of the layers of a stack."""
        return self.plan.execution.remat_of(stack.kind.feed_forward.is_routed)

    def row_remat(self, row: ParameterSpec) -> Remat:
        """Return that of the layers of a parameter; the model's outside of layers."""
        stack = self.stack_of(row)
        return self.plan.execution.remat if stack is None else self.remat(stack)

    def stack_of(self, row: ParameterSpec) -> LayerStack | None:
        """Return the stack of layers of a parameter; None outside of layers."""
        return next((stack for stack in self.stacks if row.path.startswith(f"{stack.path}/")), None)

    def row_passes(self, row: ParameterSpec) -> Passes:
        """Return how often a step uses the parameters of one layer, or one that is not stacked."""
        stack = self.stack_of(row)
        turns = 1 if stack is None else stack.turns
        return self._passes(row.path, turns * row.shape[0] if row.declaration.is_stacked else 1)

    def stack_passes(self, stack: LayerStack) -> Passes:
        """Return the passes of a device through the layers of a stack in a step."""
        return self._passes(stack.path, stack.num_calls)

    def _passes(self, path: str, layers: int) -> Passes:
        plan = self.plan
        key = (path.partition("/")[0], layers)
        if key not in self._known_passes:
            arguments = plan.model, plan.execution, plan.accumulation
            self._known_passes[key] = passes(*arguments, *key, plan.paths)
        return self._known_passes[key]

    @functools.cached_property
    def stacks(self) -> tuple[LayerStack, ...]:
        """Stacks of the model."""
        return tuple(self.plan.model.stacks)

    @functools.cached_property
    def _known_passes(self) -> dict[tuple[str, int], Passes]:
        """{(name of a scan, layers): passes}; filled as they are asked for."""
        return {}
