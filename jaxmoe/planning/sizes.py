# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Computes the sizes in a plan's formulas: tokens, rows and weights of one device.

All layouts come from the parameter table and the rules of the execution:

    T   tokens of one device's residual stream in one micro-batch: sharded by sequence and position
    T'  tokens inside a layer, where heads or hidden units are sharded instead of positions
    A   rows of its experts, T K: even, if rows are sent

Shares of parameters: `jaxmoe/planning/device_layout.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from jaxmoe.execution import Remat
from jaxmoe.layers.context import AttentionHeads, FeedForwardSizes, MixerActivations
from jaxmoe.layers.sequences import attention_sizes
from jaxmoe.models.stacks import LayerStack
from jaxmoe.parameters import ParameterSpec
from jaxmoe.planning.abstract_step import StepPlan
from jaxmoe.planning.device_layout import DeviceLayout, ParameterShares, TokenFlops
from jaxmoe.planning.pipelines import Counts, Passes, counts, least_counts, passes
from sharding import axes as ax
from sharding.sequence_parallel import AttentionSizes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of one device in one micro-batch."""

    plan: StepPlan
    layout: DeviceLayout
    """Shares that depend neither on micro-batches nor on remat."""
    sequences: float
    """B on one device; a fraction if a sequence is sharded."""
    tokens: float
    """T: tokens of the residual stream."""
    inner_tokens: float
    """T': tokens inside a layer."""
    itemsize: int
    """Bytes per value in matrix products."""
    never_waits: bool = False
    """Whether no stage waits for another, as in a bound."""

    @classmethod
    def of(cls, plan: StepPlan, flops: TokenFlops | None = None) -> Sizes:
        """Return the sizes of a plan.

        Args:
            plan: The step.
            flops: `TokenFlops.of` the plan, where it is known.
        """
        flops = TokenFlops.of(plan) if flops is None else flops
        return cls.on(DeviceLayout(plan=plan, flops=flops), plan)

    def at(self, plan: StepPlan) -> Sizes:
        """Return the sizes of the same step with other micro-batches or another remat.

        Args:
            plan: The step; on the same mesh, with the same rules, dispatcher and model.
        """
        return self.on(self.layout, plan)

    @classmethod
    def on(cls, layout: DeviceLayout, plan: StepPlan, *, never_waits: bool = False) -> Sizes:
        """Return the sizes of a plan whose layout is known.

        Args:
            layout: Layout of a plan with the same `DeviceLayout.record`.
            plan: The step.
            never_waits: Whether its stages never wait for one another.
        """
        sequences = plan.batch_size / plan.accumulation / layout.shards(ax.ACT_BATCH)
        tokens = sequences * plan.sequence_length
        return cls(
            plan=plan,
            layout=layout,
            sequences=sequences,
            tokens=tokens / layout.shards(ax.ACT_SEQ),
            inner_tokens=tokens / layout.shards(ax.ACT_SEQ_INNER),
            itemsize=layout.itemsize,
            never_waits=never_waits,
        )

    @property
    def mesh(self) -> dict[str, int]:
        """Devices along each mesh axis."""
        return self.layout.mesh

    @property
    def stacks(self) -> tuple[LayerStack, ...]:
        """Stacks of the model."""
        return self.layout.stacks

    @property
    def parameters(self) -> dict[str, ParameterShares]:
        """Shares of each parameter, by its path and in the order of the table."""
        return self.layout.parameters

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
        experts = self.layout.feed_forwards.values()
        return max(map(self.rows, experts), default=0.0) * self.shards(ax.EXPERT_MLP)

    def places(self, experts: FeedForwardSizes) -> float:
        """Return the rows for which the experts of a device have a place.

        Where rows travel it is the worst case, P T min(K, E / P) in a chunk, or what a capacity
        leaves of it. A capacity that adds assignments has slots for them beside the T K.
        """
        slots = self.sequences * experts.row_slots + experts.batch_slots
        sent = self.rows(experts) + slots
        sources = self.devices(self.expert_axes)
        num_local = experts.num_experts / self.shards(ax.EXPERTS)
        worst = sources * min(sent, self.tokens * num_local)
        return self.plan.execution.dispatcher.arriving_places(sent=sent, worst=worst)

    @property
    def expert_axes(self) -> tuple[str, ...]:
        """Mesh axes over which experts and their hidden units are spread, if they are."""
        rules = self.plan.execution.axis_rules
        return rules.mesh_axes(ax.EXPERTS) + rules.mesh_axes(ax.EXPERT_MLP)

    def pieces(self, *axes: str) -> tuple[str, ...]:
        """Return the mesh axes larger than 1 that are one of these or a piece of one."""
        return self.layout.pieces(*axes)

    def shards(self, name: str) -> int:
        """Return the number of shards of a logical axis."""
        return self.layout.shards(name)

    def devices(self, axes: Iterable[str]) -> int:
        """Return the devices along some axes together."""
        return self.layout.devices(axes)

    def kept_axes(self, row: ParameterSpec) -> tuple[str, ...]:
        """Return the axes over which a parameter stays sharded in use."""
        return self.parameters[row.path].kept_axes

    def local(self, row: ParameterSpec) -> int:
        """Return the values of a parameter stored on one device."""
        return self.parameters[row.path].local

    def copy_values(self, row: ParameterSpec) -> int:
        """Return the values on one device of the copy that layers read."""
        return self.parameters[row.path].copy_values

    def in_use(self, row: ParameterSpec) -> int:
        """Return the values of a parameter on one device in use, summed over layers."""
        return self.parameters[row.path].in_use

    def layers(self, row: ParameterSpec) -> int:
        """Return the layers stacked in a parameter on one device; 1 if it is not stacked."""
        return self.parameters[row.path].layers

    def stack_of(self, row: ParameterSpec) -> LayerStack | None:
        """Return the stack of layers of a parameter; None outside of layers."""
        return self.parameters[row.path].stack

    def remat(self, stack: LayerStack) -> Remat:
        """Return the rematerialisation of the layers of a stack."""
        return self.plan.execution.remat_of(stack.kind.feed_forward.is_routed)

    def parameter_remat(self, shares: ParameterShares) -> Remat:
        """Return that of the layers of a parameter; the model's outside of layers."""
        return self.plan.execution.remat if shares.stack is None else self.remat(shares.stack)

    def parameter_passes(self, shares: ParameterShares) -> Passes:
        """Return how often a step uses the parameters of one layer, or one that is not stacked."""
        row = shares.row
        turns = 1 if shares.stack is None else shares.stack.turns
        return self._passes(row.path, turns * row.shape[0] if row.declaration.is_stacked else 1)

    def stack_passes(self, stack: LayerStack) -> Passes:
        """Return the passes of a device through the layers of a stack in a step."""
        return self._passes(stack.path, stack.num_calls)

    def _passes(self, path: str, layers: int) -> Passes:
        plan = self.plan
        name = path.partition("/")[0]
        key = name, layers, plan.accumulation, plan.execution.pipeline, self.never_waits
        known = self.layout.passes
        if key not in known:
            pipeline_counts = None if plan.execution.mesh.stage == 1 else self.counts
            arguments = self.layout.parts, plan.execution, plan.accumulation, name, layers
            known[key] = passes(*arguments, pipeline_counts)
        return known[key]

    @property
    def counts(self) -> Counts:
        """Counts of the pipeline."""
        plan = self.plan
        pipeline = plan.execution.pipeline_order
        if self.never_waits:
            return least_counts(pipeline, plan.accumulation)
        return counts(pipeline, plan.execution.mesh.stage, plan.accumulation, plan.paths)
