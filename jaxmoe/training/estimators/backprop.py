# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Gradients by backpropagation, over the micro-batches of a step."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from jaxmoe.data.batch import Batch
from jaxmoe.layers.view import check_view
from jaxmoe.training.estimators.backward import backward_of, num_passes
from jaxmoe.training.estimators.base import Gradients, StepGradients
from jaxmoe.training.gradients import batch_gradients
from jaxmoe.training.state import TrainState

if TYPE_CHECKING:
    from jaxmoe.training.step import Step


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BackpropConfig(Gradients):
    """Backpropagation."""

    name: ClassVar[str] = "backprop"
    clips: ClassVar[Literal["norm", "projection", "nothing"]] = "norm"
    is_backward: ClassVar[bool] = True

    def check(self, step: Step) -> None:
        """Refuse probes where a layout or a format has no place for them; see `check_probes`.
        Refuse what the backward pass cannot do; see `Backward.check`."""
        backward_of(step).check(step)
        if step.has_probes:
            check_probes(step)

    def compute(
        self, step: Step, state: TrainState, batch: Batch, first_row: Any = 0
    ) -> StepGradients:
        """Return the gradients of one step; see the base class."""
        return StepGradients(*batch_gradients(step, state, batch, first_row))

    def describe(self, step: Step) -> str | None:
        """Return the passes of a step, if the adapter compares several."""
        if (passes := num_passes(step.model)) == 1:
            return None
        return f"{passes} passes over each row, after as many without a gradient"


def check_probes(step: Step) -> None:
    """Refuse what an optimiser that reads probes cannot be trained with.

    Args:
        step: With the mesh resolved.

    Raises:
        ValueError: Pipeline stages, a layout that gathers parameters itself, products in 8 bits, an
            update in parts, or a mixer whose matrices have no probes.
    """
    execution, start = step.execution, "optimizer:mkor measures every dense matrix"
    if execution.mesh.stage > 1:
        raise ValueError(
            f"{start}, and a stage has some of the layers: execution.mesh.stage="
            f"{execution.mesh.stage} must be 1"
        )
    check_view(execution)
    if execution.halo is not None:
        raise ValueError(
            f"{start}, and execution.precision.matmul rounds their operands: set it to full"
        )
    if execution.updates_in_parts:
        raise ValueError(
            f"{start}, and its statistics are those of all layers: set execution.optimizer_parts"
            " to 1"
        )
    for kind in step.model.kinds:
        if not kind.mixer.can_quantize:
            raise ValueError(
                f"{start}, and those of the mixer {kind.mixer.name!r} cannot be measured: choose"
                " optimizer:adamw"
            )
