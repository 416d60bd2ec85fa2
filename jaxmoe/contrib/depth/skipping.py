# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Chooses the layers of each micro-batch: some groups only (SkipPipe), or in another order.

The longest scan of equal layers is cut into equal groups, and a micro-batch leaves out the same
ones in every step (`paths.py`). A layer that is left out passes the stream on. It has no routing
statistics, no balance losses and no gradient from that micro-batch. Held-out losses and generation
use all layers.

Without stages all layers are computed and those left out are masked, which saves no time. With
stages there is no work for them in the timetable (`sharding/pipeline/first_come.py`).

Source: arXiv 2502.19913, section 4. It never leaves out the first groups; here any may be, because
embedding and head belong to no group. A stage whose only group is never left out works on every
micro-batch, and then no time is saved.

With `order=swapped_ends` half of the micro-batches pass through the first two groups, and through
the last two, in the other order (CheckFree+, arXiv 2506.15461). A group beside an end then learns
its place, so that a copy of it costs less where the end is lost with a device
(`--parts check_free`). Layers keep their routers and their noise in either order.
"""

from __future__ import annotations

import dataclasses
import types
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Int

from jaxmoe import combinations
from jaxmoe.contrib.depth.paths import Order, choose_paths
from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.records import LayerInputs, LayerOutputs
from jaxmoe.layers.rows import RowTransform
from jaxmoe.models.config import ModelConfig
from jaxmoe.models.stacks import Scan
from jaxmoe.training.estimators.backprop import BackpropConfig
from jaxmoe.training.estimators.base import LayerPaths
from jaxmoe.training.estimators.skipping import Skipping
from sharding import axes as ax
from sharding.pipeline import Paths

if TYPE_CHECKING:
    from jaxmoe.training.step import Step


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SkippingConfig(Skipping):
    """Layers that a micro-batch leaves out (SkipPipe), and their order (CheckFree+)."""

    name: ClassVar[str] = "skipping"

    ratio: float = 0.25
    """Share of the groups that a micro-batch leaves out, rounded to whole groups; 0 only where the
    order is another one."""
    never: tuple[int, ...] = ()
    """Groups, from 0, that no micro-batch leaves out."""
    groups: int = 4
    """Equal groups into which the layers are cut; on a mesh with stages execution.mesh.stage times
    execution.pipeline.chunks."""
    order: Order = "ascending"
    """Order of the groups: ascending, or swapped_ends, where half of the micro-batches pass through
    the first two and the last two in the other order, on a mesh with stages."""

    def __post_init__(self):
        is_least = self.ratio == 0.0 and self.order != "ascending"
        if not (0.0 < self.ratio <= 0.5 or is_least):
            raise ValueError(
                f"training.skipping.ratio={self.ratio} must be above 0 and at most 0.5"
            )
        if self.groups < 2:
            raise ValueError(f"training.skipping.groups={self.groups} must be at least 2")
        # Raises where there are none.
        choose_paths(self.groups, 1, self.ratio, self.never, self.order)

    @property
    def gradients(self) -> PartialBackprop:
        """Backpropagation through the layers that each micro-batch passes through."""
        return PartialBackprop(skipping=self)

    @property
    def num_left_out(self) -> int:
        """Number of groups that a micro-batch leaves out."""
        return round(self.ratio * self.groups)

    @property
    def share_left_out(self) -> float:
        """Share of the groups that a micro-batch leaves out."""
        return self.num_left_out / self.groups

    def paths(self, micro_batches: int) -> Paths | None:
        """Return the paths of the micro-batches of a step; None if all pass through all in order.

        Args:
            micro_batches: Micro-batches of a step.
        """
        if self.num_left_out == 0 and self.order == "ascending":
            return None
        return choose_paths(self.groups, micro_batches, self.ratio, self.never, self.order)

    def time_saved(self, execution: ExecutionConfig, accumulation: int) -> float:
        """Return the share of the layers' time that the timetable saves; 0 without stages.

        Args:
            execution: Schedule, and mesh with every size filled in.
            accumulation: Micro-batches of a step.
        """
        stages = execution.mesh.stage
        paths = self.paths(accumulation)
        if stages == 1 or paths is None:
            return 0.0
        tables = [
            execution.pipeline_order.schedule(stages, accumulation, paths_tried)
            for paths_tried in (paths, None)
        ]
        partial, full = (table.seconds() for table in tables)
        return 1.0 - partial / full

    def describe(self, execution: ExecutionConfig, accumulation: int) -> str:
        """Return what micro-batches leave out or swap, and the time that this saves, as text."""
        saved = self.time_saved(execution, accumulation)
        text = f"{self.share_left_out:.0%} of {self.groups} groups of layers"
        if self.order != "ascending":
            text = f"{text}, {self.order} in half of the micro-batches"
        if execution.mesh.stage == 1:
            return f"{text}, masked: no time saved without stages"
        return f"{text}: {abs(saved):.0%} {'less' if saved >= 0 else 'more'} time in layers planned"

    def row(self, execution: ExecutionConfig, accumulation: int) -> dict[str, Any]:
        """Return what micro-batches leave out, and the time that this saves, for the summary."""
        return {
            "groups": self.groups,
            "left_out": self.num_left_out,
            "time_saved": self.time_saved(execution, accumulation),
        }

    def check(self, step: Step) -> None:
        """Check, before anything is traced, that a model can be trained with it.

        Raises:
            ValueError: The groups divide neither the layers nor fit the stages, or another choice
                needs every layer of every micro-batch.
        """
        model = step.model
        execution = step.execution
        training = types.SimpleNamespace(
            skipping=self,
            accumulation=step.accumulation,
            accumulated_balance=step.accumulated_balance,
        )
        combinations.check(model=model, execution=execution, training=training)
        scan = _longest_scan(model)
        if scan.length % self.groups:
            kind = "periods of layers" if scan.is_cycle else "equal layers"
            raise ValueError(
                f"training.skipping.groups={self.groups} must divide the {scan.length} {kind} of"
                f" {scan.name}"
            )


@dataclasses.dataclass(frozen=True, slots=True)
class PartialRows(RowTransform):
    """Rows that some groups of the layers of a scan pass on as they are."""

    scan: Scan
    """Layers, in equal groups."""
    computed: Bool[Array, " groups"]
    """Whether the rows pass through a group."""

    def layer(self, block: type[nn.Module], scan: str) -> type[nn.Module]:
        """Return the layer that computes its results, and takes them where its group is on."""
        if scan != self.scan.name:
            return block
        computed = jnp.repeat(self.computed, self.scan.length // self.computed.shape[0])

        class PartialLayer(block):
            def __call__(
                self, stream: Any, layer: LayerInputs, tokens: Any
            ) -> tuple[Any, LayerOutputs]:
                """Return the results of the layer, or the stream before it and no sums."""
                after, outputs = super().__call__(stream, layer, tokens)
                is_on = computed[layer.stack_layer]
                after = jax.tree.map(lambda new, old: jnp.where(is_on, new, old), after, stream)
                statistics, losses = jax.tree.map(
                    lambda x: jnp.where(is_on, x, jnp.zeros_like(x)),
                    (outputs.statistics, outputs.losses),
                )
                return after, dataclasses.replace(outputs, statistics=statistics, losses=losses)

        return PartialLayer


def _longest_scan(model: ModelConfig) -> Scan:
    """Return the layers that are cut into groups."""
    (scan,) = (scan for scan in model.scans if scan.axis == ax.LAYERS)
    return scan


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PartialBackprop(BackpropConfig):
    """Backpropagation through the layers that each micro-batch passes through."""

    skipping: SkippingConfig
    """Layers that are left out, or their order."""

    def paths(self, micro_batches: int) -> LayerPaths | None:
        """Return the groups that each micro-batch passes through; see the base class."""
        paths = self.skipping.paths(micro_batches)
        if paths is None:
            return None
        groups = self.skipping.groups

        def rows(model: ModelConfig, number: Int[Array, ""]) -> PartialRows:
            computed = jnp.asarray([[group in path for group in range(groups)] for path in paths])
            return PartialRows(_longest_scan(model), computed[number])

        return LayerPaths(groups_of=paths, groups=groups, rows=rows)

    def check(self, step: Step) -> None:
        """Refuse what layers cannot be left out of; see `SkippingConfig.check`."""
        # Named: a class with slots is a copy, which super() without arguments does not find.
        BackpropConfig.check(self, step)
        self.skipping.check(step)
