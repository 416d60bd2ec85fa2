# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Layouts of the training state: parameters, gradients and optimiser state, each by its rules.

With P parameters, b bytes per value on the wire, n devices in a replica that share batches and r
replicas, a step moves per device (ring algorithms: AG all-gather, RS reduce-scatter, AR all-reduce)

    name           parameters   gradients    optimiser    (n - 1) / n P b times
    data_parallel  whole        whole        whole        2    AR
    zero1          whole        whole        1/n          2    RS, and AG behind the update
    zero2          1/n, whole   1/n          1/n          2    RS, and AG before the first layer
                   in a step
    fully_sharded  1/n          1/n          1/n          3    AG forward and backward, RS
    hybrid         1/n          1/n          1/nr         3    and across replicas RS, AG of P / n
    hierarchical   1/nr         1/nr         1/nr         3    and across replicas one AG of P / n
                                                               that the backward pass keeps, RS
    nested         1/nr, 1/w    1/nr         1/nr         3    over w devices; over the others AG
                   in a step                                   once a step, and RS

nested splits the copy that layers read over the w devices of expert x seq, the nearest ones, and
all else over all devices: beside zero2 it needs 1 / w of the memory for copies, beside
fully_sharded nothing distant is gathered twice. Sums of gradients over data alone would not save
anything: the partitioner adds each micro-batch over replicas at once.

fully_sharded with replicas keeps r copies of everything and adds an AR of P / n across them. In all
layouts that split parameters within a replica the reduction has two levels: a reduce-scatter
within, and the remaining P / n of each gradient across (under `hierarchical` only parameters
outside the layers are reduced over all nr devices at once). An AR is an RS and an AG, so zero1
needs no more than data_parallel once XLA has turned its AR and slice into an RS (as zero2's, and
those across replicas); XLA does that on accelerators, not on the CPU. Sources: ZeRO, 1910.02054;
secondary shards, arXiv 2306.10209; nested levels, arXiv 2501.04266.

To add a layout: an entry in STATE_LAYOUTS and its name in `StateLayoutName`, both in
sharding/state_layouts.py, a pair in LAYOUTS of tests/support/meshes.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Final, Literal

from sharding import axes as ax
from sharding.fold import Refinement
from sharding.rules import DATA_PARALLEL, FULLY_SHARDED, LogicalAxisRules

StateLayoutName = Literal[
    "data_parallel", "zero1", "zero2", "fully_sharded", "hybrid", "hierarchical", "nested"
]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StateLayout:
    """Layout of parameters and optimiser state, and when parameters are gathered."""

    parameters: LogicalAxisRules
    """Rules of the parameters and of all activations."""
    optimizer: LogicalAxisRules
    """Rules of the optimiser state, and of gradients and parameters during the update."""
    copies: LogicalAxisRules | None = None
    """Rules of the copy of the parameters that is gathered once a step; None where none is."""
    gathered: Literal["layer", "step", "replica"] = "layer"
    """When split parameters are gathered. layer: each where it is used; step: all once a step, to
    `copies`; replica: across replicas once a step, and within a replica where each is used."""

    @property
    def rules(self) -> tuple[LogicalAxisRules, ...]:
        """Distinct rules, all of which must divide the parameters."""
        parts = (self.parameters, self.optimizer, self.copies)
        return tuple(dict.fromkeys(rules for rules in parts if rules is not None))

    @property
    def is_streamable(self) -> bool:
        """Whether a step needs the parameters of one layer at a time only."""
        return self.gathered == "layer" and self.parameters == self.optimizer

    def on_stages(self) -> StateLayout:
        """Return the same layout with layers and vocabulary split over pipeline stages."""
        return self._with(lambda rules: rules.on_stages())

    def on_fold(self, refinement: Refinement) -> StateLayout:
        """Return the same layout on a folded mesh."""
        return self._with(lambda rules: rules.on_fold(refinement))

    def _with(self, change: Callable[[LogicalAxisRules], LogicalAxisRules]) -> StateLayout:
        """Return the same layout with each of its rules changed."""
        return dataclasses.replace(
            self,
            parameters=change(self.parameters),
            optimizer=change(self.optimizer),
            copies=None if self.copies is None else change(self.copies),
        )


ACROSS_REPLICAS = FULLY_SHARDED.replace(
    embed=(ax.DATA, ax.EXPERT, ax.SEQ, ax.REPLICA),
    expert_embed=(ax.DATA, ax.SEQ, ax.REPLICA),
    memory_dim=(ax.DATA, ax.SEQ, ax.REPLICA),
)
"""Split within a replica, and each piece across replicas; in the other order a gather across
replicas would have to reorder its result."""


def _outwards(*axes: str) -> LogicalAxisRules:
    """Return rules that split parameters over these axes, each piece over the next ones."""
    experts = tuple(axis for axis in axes if axis != ax.EXPERT)
    return FULLY_SHARDED.replace(embed=axes, expert_embed=experts)


NESTED = _outwards(ax.EXPERT, ax.SEQ, ax.REPLICA, ax.DATA)
"""Split over the nearest devices, and each piece over the others in the order of the mesh: in
another order XLA turns no sum and slice into a reduce-scatter."""


STATE_LAYOUTS: Final[dict[StateLayoutName, StateLayout]] = {
    "data_parallel": StateLayout(parameters=DATA_PARALLEL, optimizer=DATA_PARALLEL),
    "zero1": StateLayout(parameters=DATA_PARALLEL, optimizer=FULLY_SHARDED),
    "zero2": StateLayout(
        parameters=FULLY_SHARDED, optimizer=FULLY_SHARDED, copies=_outwards(), gathered="step"
    ),
    "fully_sharded": StateLayout(parameters=FULLY_SHARDED, optimizer=FULLY_SHARDED),
    "hybrid": StateLayout(parameters=FULLY_SHARDED, optimizer=ACROSS_REPLICAS),
    "hierarchical": StateLayout(
        parameters=ACROSS_REPLICAS, optimizer=ACROSS_REPLICAS, gathered="replica"
    ),
    "nested": StateLayout(
        parameters=NESTED,
        optimizer=NESTED,
        copies=_outwards(ax.EXPERT, ax.SEQ),
        gathered="step",
    ),
}
